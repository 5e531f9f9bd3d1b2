"""Is this tensor what was promised?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.plugin_guard.calls import quote

MARGIN = 64
"""Elements on both sides of memory that a native call writes to."""
_MARK = 97.0


def tensor_problem(found: object, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> str:
    """``returned bfloat16 [2, 8], expected contiguous float32 [2, 8] on cpu``; empty if it is what was expected."""
    if not isinstance(found, Tensor):
        return f"returned {quote(found)}, expected a tensor"
    right = tuple(found.shape) == tuple(shape) and found.dtype == dtype and found.device.type == device.type
    if right and found.is_contiguous():
        return ""
    layout = "" if found.is_contiguous() else "not contiguous "
    return (
        f"returned {layout}{_named(found.dtype)} {list(found.shape)} on {found.device.type}, "
        f"expected contiguous {_named(dtype)} {list(shape)} on {device.type}"
    )


def value_problem(got: Tensor, want: Tensor, tolerance: float) -> str:
    """How far ``got`` is from its definition, as a share of the largest number of ``want``; empty if near enough, or if
    a definition in float16 overflows."""
    in_half, want = want.dtype == torch.float16, want.double()
    if not bool(want.isfinite().all()):
        return "" if in_half else "has a definition that gives NaN or infinity"
    if not bool(got.isfinite().all()):
        return "returned NaN or infinity where its definition has none"
    gap = float((got.double() - want).abs().max() / want.abs().max().clamp(min=1e-30)) if want.numel() else 0.0
    return f"is off by {gap:.1%} of the largest number, expected at most {tolerance:.1%}" if gap > tolerance else ""


class Bounded:
    """Contiguous memory that somebody is handed a pointer to, between margins that must stay as they are."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        size = int(torch.Size(shape).numel())
        self._whole = torch.full((size + 2 * MARGIN,), _MARK, dtype=dtype)
        self.inner = self._whole[MARGIN : MARGIN + size].view(*shape)

    def problem(self) -> str:
        """Empty while nobody has written beside the memory."""
        outside = torch.cat((self._whole[:MARGIN], self._whole[-MARGIN:]))
        return "" if bool((outside == _MARK).all()) else f"writes outside of its output {list(self.inner.shape)}"


def random(shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Normally distributed, the same on every machine."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
