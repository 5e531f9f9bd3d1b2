"""What the built-in attention kernels need (readable without importing torch or Triton)."""

from __future__ import annotations

import os
from collections.abc import Iterable

from engine.contracts.model import DeviceFacts, ModelFacts
from engine.contracts.ops import Attention

TRITON_CAPABILITY = (8, 0)
"""Least CUDA compute capability: the tiles are laid out for its shared memory and asynchronous copies."""
TRITON_HEAD_DIMS = tuple(range(8, 257, 8))
TRITON_VALUE_DIM, TRITON_REST_DIM = 512, 64
"""Of latent attention, at most: a key's numbers that are its value too, and those after them."""


def beyond_triton_heads(attentions: Iterable[Attention]) -> tuple[str, ...]:
    """Sizes of heads that no tile has, each with the reason."""
    ops = tuple(attentions)
    reasons = []
    for dim in sorted({op.head_dim for op in ops if op.value_dim is None} - set(TRITON_HEAD_DIMS)):
        reasons.append(f"head_dim={dim} is not a multiple of 8 up to {TRITON_HEAD_DIMS[-1]}")
    for values, rest in sorted({(op.value_dim, op.head_dim - op.value_dim) for op in ops if op.value_dim is not None}):
        if values % 8 or rest % 8 or values > TRITON_VALUE_DIM or rest > TRITON_REST_DIM:
            reasons.append(
                f"latent keys of {values} + {rest} numbers: expected multiples of 8 up to {TRITON_VALUE_DIM} + "
                f"{TRITON_REST_DIM}"
            )
    return tuple(reasons)


def beyond_triton(model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
    reasons = []
    # Triton itself reads this variable when a kernel is defined, so it cannot come from the configuration.
    if os.environ.get("TRITON_INTERPRET") != "1":
        if device.kind != "cuda":
            reasons.append("needs a CUDA device")
        elif device.capability is not None and device.capability < TRITON_CAPABILITY:
            has, needs = (".".join(map(str, version)) for version in (device.capability, TRITON_CAPABILITY))
            reasons.append(f"needs compute capability {needs}, this device has {has}")
    reasons.extend(beyond_triton_heads(model.attentions))
    return tuple(reasons)
