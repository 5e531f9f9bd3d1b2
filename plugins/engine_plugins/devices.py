"""Devices that plugins of several slots are written for: reasons against others."""

from __future__ import annotations

from engine.contracts.model import DeviceFacts, ModelFacts


def only_cpus(model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
    return () if device.kind == "cpu" else (f"it moves tensors of CPUs, not {device.kind}",)


def only_compiling_cpus(model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
    if device.kind != "cpu":
        return (f"its kernels are for CPUs, not {device.kind}",)
    if "cxx" not in device.features:
        return (f"it needs a C++ compiler: {device.no_cxx}",)
    return ()


def only_gpus(model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
    return () if device.kind == "cuda" else (f"it moves tensors of GPUs, not {device.kind}",)
