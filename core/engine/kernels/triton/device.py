"""What the launches need to know about the device."""

from __future__ import annotations

import os

import torch

INTERPRETED_SMS = 4
"""Kernels run by Triton's interpreter: a "device" so small keeps grids small."""


def runs_triton(device: torch.device | str) -> bool:
    """Whether Triton kernels run on this torch device: on CUDA, and anywhere under Triton's own interpreter.

    ``TRITON_INTERPRET`` is Triton's switch, read by Triton when it is first imported; asking it this way spares a
    process without Triton kernels that import.
    """
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
    return interpreted or torch.device(device).type == "cuda"


def multiprocessors(device: str) -> int:
    """Number of multiprocessors the launches are shaped for."""
    if torch.device(device).type != "cuda":
        return INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(torch.device(device)).multi_processor_count)


def has_dependent_launch(device: str) -> bool:
    """Whether a kernel may start before its predecessor ends (programmatic dependent launch, capability 9.0)."""
    return torch.device(device).type == "cuda" and torch.cuda.get_device_capability(torch.device(device)) >= (9, 0)
