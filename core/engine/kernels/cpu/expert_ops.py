"""Mixtures of experts on a CPU: of tensors, or of the values of a program."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from engine import native
from engine.contracts.ops import Experts, Route
from engine.contracts.quantizer import PackedLinear
from engine.kernels.cpu.layer_ops import SUFFIXES
from engine.kernels.cpu.program import NotNative, empty, run
from engine.kernels.settings import MOST_TOKENS
from engine.native import FLOAT, INT64, POINTER, NativeCall, calls

SCORES = ("softmax", "sigmoid", "logits")
"""As the numbers of ``Scores`` in ``expert_ops.cpp``."""
MOST_GROUPS = 64


class _Choice(ctypes.Structure):
    """``Choice`` of ``expert_ops.cpp``."""

    _fields_ = (
        *((name, INT64) for name in ("num_experts", "top_k", "in_features")),
        *((name, POINTER) for name in ("router", "router_bias", "correction")),
        *((name, INT64) for name in ("scores", "renormalize", "groups", "chosen_groups", "by_two")),
        ("scale", FLOAT),
        ("room", POINTER),
    )


class _Experts(ctypes.Structure):
    """``Experts`` of ``expert_ops.cpp``."""

    _fields_ = (
        *((name, INT64) for name in ("num_experts", "top_k", "in_features", "out_features")),
        *((name, POINTER) for name in ("gate_up", "down", "into", "out", "sums")),
    )


@cache
def kernels() -> ctypes.CDLL:
    """The compiled functions. Raises :class:`engine.native.NativeError`."""
    types = {
        "choose_experts": (POINTER, INT64, POINTER, INT64, POINTER, POINTER),
        "mix_experts": (POINTER, INT64, POINTER, INT64, POINTER, POINTER, POINTER, POINTER),
    }
    functions = {f"{name}_{suffix}": types[name] for name in types for suffix in SUFFIXES.values()}
    return native.load(Path(__file__).with_suffix(".cpp"), functions)


class ChooseExperts:
    """Router and route in one pass: ``x [rows, in] -> ids`` int64 and ``weights`` float32, ``[rows, top_k]``."""

    def __init__(
        self, op: Route, router: Tensor, router_bias: Tensor | None, correction: Tensor | None, dtype: torch.dtype
    ) -> None:
        """Tensors are float32: ``[num_experts, in]`` and ``[num_experts]``."""
        room = torch.empty(2 * op.num_experts + op.groups)
        self._held = (router, router_bias, correction, room)  # pointed at
        self._top_k = op.top_k
        self._function = getattr(kernels(), f"choose_experts_{SUFFIXES[dtype]}")
        pointers = (native.pointer(tensor) for tensor in self._held[:3])
        self._choice = _Choice(
            op.num_experts, op.top_k, router.shape[1], *pointers, SCORES.index(op.scores), op.renormalize, op.groups,
            op.chosen_groups, op.group_by == "top2", op.scale, room.data_ptr(),
        )  # fmt: skip

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids = empty(x, "expert_ids", (x.shape[0], self._top_k), torch.int64)
        weights = empty(x, "expert_weights", (x.shape[0], self._top_k), torch.float32)
        run(self._call, x, ids, weights)
        return ids, weights

    def _call(self, x: Tensor, ids: Tensor, weights: Tensor) -> NativeCall:
        assert x.stride(1) == 1
        pointers = ids.data_ptr(), weights.data_ptr()
        found: NativeCall = self._function.at(
            ctypes.addressof(self._choice), x.shape[0], x.data_ptr(), x.stride(0), *pointers
        )
        return found


class MixExperts:
    """What chosen experts make of up to :data:`MOST_TOKENS` tokens, as one call: only their weights are read."""

    def __init__(self, op: Experts, pairs: Sequence[tuple[PackedLinear, PackedLinear]], dtype: torch.dtype) -> None:
        """``pairs``: gate and up, and down, of each expert. Raises :class:`NotNative`."""
        without = next((linear.label for pair in pairs for linear in pair if linear.native is None), None)
        if without is not None or not op.gated.is_plain or op.gated.act not in native.ACTIVATIONS:
            raise NotNative(f"its experts ({without or op.gated}) have no native calls")
        if op.weighs_inputs:
            raise NotNative("its experts read weighted inputs")
        into, inner, out = (
            torch.zeros(1, size, dtype=dtype)
            for size in (op.gate_up.in_features, op.down.in_features, op.down.out_features)
        )
        sums = torch.empty(MOST_TOKENS, op.down.out_features)
        up = calls.table([linear.native(into, inner, act=op.gated.act) for linear, _ in pairs if linear.native])
        down = calls.table([linear.native(inner, out) for _, linear in pairs if linear.native])
        self._held = (pairs, into, inner, out, sums, up, down)  # pointed at
        self._function = getattr(kernels(), f"mix_experts_{SUFFIXES[dtype]}")
        self._out_features = op.down.out_features
        self._experts = _Experts(
            op.num_experts, op.top_k, op.gate_up.in_features, op.down.out_features, ctypes.addressof(up),
            ctypes.addressof(down), into.data_ptr(), out.data_ptr(), sums.data_ptr(),
        )  # fmt: skip

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None, y: Tensor | None) -> Tensor:
        """``[rows, out]``, written to ``y`` if it is given, which may be the residual."""
        y = empty(x, "mixed", (x.shape[0], self._out_features)) if y is None else y
        run(self._call, x, ids, weights, residual, y)
        return y

    def _call(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None, y: Tensor) -> NativeCall:
        assert x.stride(1) == 1 and ids.is_contiguous() and weights.is_contiguous() and y.is_contiguous()
        assert residual is None or residual.is_contiguous()
        found: NativeCall = self._function.at(
            ctypes.addressof(self._experts), x.shape[0], x.data_ptr(), x.stride(0), ids.data_ptr(),
            weights.data_ptr(), native.pointer(residual), y.data_ptr(),
        )  # fmt: skip
        return found
