"""``execution``: how a step runs. Which ways this machine, model and attention kernel have, and which is taken.

``eager``: torch ops. ``compile``: kernels built on this machine, C++ on a CPU and Triton on a GPU. ``graphs``: the
same, and decode steps, and prompts that are short and alone, captured as CUDA graphs.
"""

from __future__ import annotations

import importlib.util

from engine.assembly.errors import listing
from engine.contracts.model import DeviceFacts

COMPILED_DTYPES = ("float32", "bfloat16")
"""What the C++ kernels compute in."""

TRITON_CAPABILITY = (8, 0)
"""Least compute capability for the Triton kernels: bfloat16 and asynchronous copies."""

CAPTURABLE = "capturable"
"""Capability of attention kernels that can be captured in a CUDA graph."""

BEST_FIRST = ("graphs", "compile", "eager")


def reasons_against(execution: str, device: DeviceFacts, dtype: str, attention: str, capturable: bool) -> list[str]:
    """Why a step cannot run this way. ``attention``: the name of the attention kernel, for the reason."""
    if execution == "eager":
        return []
    if device.kind == "cpu":
        return _against_native(device, dtype) if execution == "compile" else ["CUDA graphs need a CUDA device"]
    reasons = _against_triton(device)
    if execution == "graphs" and not capturable:
        reasons.append(f"attention_kernel={attention} cannot be captured in a CUDA graph")
    return reasons


def choose_execution(
    wanted: str, device: DeviceFacts, dtype: str, attention: str, capturable: bool
) -> tuple[str, list[str]]:
    """What ``execution`` becomes, and notes on what ``auto`` had to pass over."""
    if wanted != "auto":
        return wanted, []
    notes: list[str] = []
    for execution in BEST_FIRST:
        if execution == "graphs" and device.kind == "cpu":
            continue
        reasons = reasons_against(execution, device, dtype, attention, capturable)
        if not reasons:
            return execution, [f"execution=auto chose {execution}: {'; '.join(notes)}"] if notes else []
        notes.append(f"{execution} unavailable ({'; '.join(reasons)})")
    raise AssertionError("eager is always possible")


def _against_native(device: DeviceFacts, dtype: str) -> list[str]:
    """Why the core's C++ kernels cannot run this model here."""
    reasons = [] if "cxx" in device.features else [f"compiling needs a C++ compiler: {device.no_cxx}"]
    if dtype not in COMPILED_DTYPES:
        reasons.append(f"it computes in {listing(COMPILED_DTYPES)}, not in {dtype}")
    return reasons


def _against_triton(device: DeviceFacts) -> list[str]:
    """Why the core's Triton kernels cannot run here."""
    reasons = []
    if importlib.util.find_spec("triton") is None:
        reasons.append("triton is not installed")
    if device.capability is not None and device.capability < TRITON_CAPABILITY:
        found, least = (".".join(map(str, version)) for version in (device.capability, TRITON_CAPABILITY))
        reasons.append(f"the Triton kernels need compute capability {least}, {device.name or 'this GPU'} has {found}")
    return reasons
