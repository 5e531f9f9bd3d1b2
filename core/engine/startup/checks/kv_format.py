"""A format of cached keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.contracts.kv_format import KVFormat
from engine.kernels.checks.tensors import random, tensor_problem
from engine.kernels.storage import largest_value
from engine.kv.cache import storage_of
from engine.plugin_guard.calls import contract_error

TOKENS = 40
LARGE = 1e4
"""Keys that no checkpoint's scales foresee."""


def check_kv_format(kv_format: KVFormat, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
    """Raise :class:`~engine.plugin_guard.calls.PluginError` for what ``pack`` and ``unpack`` do to a few tokens."""
    storage = storage_of(kv_format, str(dtype).removeprefix("torch."))
    x = random((TOKENS, num_kv_heads, head_dim), dtype, torch.device(device))
    scale = fitting_scale(kv_format, x, storage)
    before = x.clone()
    packed = _packed(kv_format, x, scale, storage)
    if not torch.equal(x, before):
        raise contract_error(kv_format, "pack", "changed its input")
    read = kv_format.unpack(packed, scale, dtype)
    wrong = tensor_problem(read, x.shape, dtype, x.device)
    if wrong:
        raise contract_error(kv_format, "unpack", wrong)
    if kv_format.lossless and not torch.equal(read, x):
        raise contract_error(kv_format, "unpack", "gave back other numbers than were packed, although lossless is True")
    gap = float((read.double() - x.double()).abs().max() / x.double().abs().max())
    if not gap <= 0.5:
        raise contract_error(
            kv_format, "unpack", f"gave back numbers that are off by {gap:.0%} of the largest that was packed"
        )
    if kv_format.scale == "none" and storage == dtype and not torch.equal(packed, x):
        raise contract_error(kv_format, "pack", "changed what is stored as it is (no scale, the compute dtype)")
    large = kv_format.unpack(_packed(kv_format, LARGE * x, scale, storage), scale, torch.float32)
    if not bool(large.isfinite().all()):
        raise contract_error(
            kv_format, "pack", f"made NaN or infinity of finite numbers up to {LARGE * float(x.abs().max()):.0f}"
        )
    if not torch.equal(kv_format.unpack(packed, scale, dtype), read):
        raise contract_error(kv_format, "unpack", "gave back other numbers once others had been packed")


def _packed(kv_format: KVFormat, x: Tensor, scale: Tensor | None, storage: torch.dtype) -> Tensor:
    packed = kv_format.pack(x, scale)
    wrong = tensor_problem(packed, x.shape, storage, x.device)
    if wrong:
        raise contract_error(kv_format, "pack", wrong)
    return packed


def fitting_scale(kv_format: KVFormat, x: Tensor, storage: torch.dtype) -> Tensor | None:
    """What ``x`` is packed with, so that its largest element becomes the largest number of ``storage``: float32
    ``[num_kv_heads]`` or ``[num_tokens, num_kv_heads]``."""
    if kv_format.scale == "none":
        return None
    largest = x.float().abs().amax(-1) / largest_value(storage)
    return largest if kv_format.scale == "per_token_head" else largest.amax(0)
