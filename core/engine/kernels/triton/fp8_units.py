"""Which devices multiply FP8 (importable without torch)."""

from __future__ import annotations

from engine.contracts.model import DeviceFacts

FP8_UNITS = (8, 9)
"""Compute capability from which on a GPU multiplies FP8."""


def has_fp8_units(capability: tuple[int, int] | None) -> bool:
    """Of a GPU. One that did not say what it is is taken for a new one."""
    return capability is None or capability >= FP8_UNITS


def multiplies_fp8(device: DeviceFacts) -> bool:
    """Whether the device has units for FP8."""
    return device.kind == "cuda" and has_fp8_units(device.capability)
