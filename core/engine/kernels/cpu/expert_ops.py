"""Mixtures of experts on a CPU: of tensors, or of the values of a program."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from math import inf
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from engine import native
from engine.contracts.ops import Experts, Route
from engine.kernels.cpu.layer_ops import SUFFIXES
from engine.kernels.cpu.program import NotNative, empty, run
from engine.kernels.linear import PackedLinear
from engine.native import FLOAT, INT32, INT64, POINTER, NativeCall, calls

SCORES = ("softmax", "sigmoid", "logits")
"""As the numbers of ``Scores`` in ``expert_ops.cpp``."""
MOST_GROUPS = 64


ROW_ALIGNMENT = 32
"""Elements between rows that experts read, beside the rows: whole pages apart, all would share a few places of the
first-level cache."""


class _Choice(ctypes.Structure):
    """``Choice`` of ``expert_ops.cpp``."""

    _fields_ = (
        *((name, INT64) for name in ("num_experts", "top_k", "in_features")),
        *((name, POINTER) for name in ("router", "router_bias", "correction", "expert_scale")),
        *((name, INT64) for name in ("scores", "renormalize", "groups", "chosen_groups", "by_two")),
        ("scale", FLOAT),
    )


class _Layers(ctypes.Structure):
    """``Layers`` of ``expert_ops.cpp``."""

    _fields_ = (("calls", POINTER), *((name, INT64) for name in ("rows", "x", "y", "x_stride", "y_stride")))


class _Experts(ctypes.Structure):
    """``Experts`` of ``expert_ops.cpp``."""

    _fields_ = (
        *((name, INT64) for name in ("num_experts", "top_k", "in_features", "inner_features", "out_features")),
        *((name, _Layers) for name in ("gate_up", "down")),
        ("activation", INT64),
        *((name, FLOAT) for name in ("limit", "alpha", "offset")),
        ("weighs_inputs", INT32),
    )


@cache
def kernels() -> ctypes.CDLL:
    """The compiled functions. Raises :class:`engine.native.NativeError`."""
    types = {
        "choose_experts": (POINTER, INT64, POINTER, INT64, POINTER, POINTER, POINTER),
        "mix_experts": (POINTER, INT64, POINTER, INT64, POINTER, POINTER, POINTER, POINTER, POINTER, POINTER),
    }
    functions = {f"{name}_{suffix}": types[name] for name in types for suffix in SUFFIXES.values()}
    functions["count_experts"] = (INT64, POINTER, POINTER)
    return native.load(Path(__file__).with_suffix(".cpp"), functions)


def count_experts(ids: Tensor, counts: Tensor) -> None:
    """Add to ``counts``, int64 ``[num_experts]``, how often each expert is among ``ids``, int64."""
    run(_count, ids, counts)


def _count(ids: Tensor, counts: Tensor) -> NativeCall:
    assert ids.is_contiguous() and ids.dtype == counts.dtype == torch.int64
    count = cast(native.Function, kernels().count_experts)
    return count.at(ids.numel(), ids.data_ptr(), counts.data_ptr())


class ChooseExperts:
    """Router and route in one pass: ``x [rows, in] -> ids`` int64 and ``weights`` float32, ``[rows, top_k]``."""

    def __init__(
        self,
        op: Route,
        router: Tensor,
        router_bias: Tensor | None,
        correction: Tensor | None,
        dtype: torch.dtype,
        expert_scale: Tensor | None = None,
    ) -> None:
        """Tensors are float32: ``[num_experts, in]`` and ``[num_experts]``."""
        self._held = (router, router_bias, correction, expert_scale)  # pointed at
        self._top_k, self._room = op.top_k, 2 * op.num_experts + op.groups
        self._function = getattr(kernels(), f"choose_experts_{SUFFIXES[dtype]}")
        pointers = (native.pointer(tensor) for tensor in self._held)
        self._choice = _Choice(
            op.num_experts, op.top_k, router.shape[1], *pointers, SCORES.index(op.scores), op.renormalize, op.groups,
            op.chosen_groups, op.group_by == "top2", op.scale,
        )  # fmt: skip

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.shape[0]
        ids = empty(x, "expert_ids", (rows, self._top_k), torch.int64)
        weights = empty(x, "expert_weights", (rows, self._top_k), torch.float32)
        run(self._call, x, ids, weights, empty(x, "expert_scores", (rows, self._room), torch.float32))
        return ids, weights

    def _call(self, x: Tensor, ids: Tensor, weights: Tensor, room: Tensor) -> NativeCall:
        assert x.stride(1) == 1
        pointers = ids.data_ptr(), weights.data_ptr(), room.data_ptr()
        found: NativeCall = self._function.at(
            ctypes.addressof(self._choice), x.shape[0], x.data_ptr(), x.stride(0), *pointers
        )
        return found


class MixExperts:
    """What chosen experts make of tokens, as one call: each is read once, and only those."""

    def __init__(self, op: Experts, pairs: Sequence[tuple[PackedLinear, PackedLinear]], dtype: torch.dtype) -> None:
        """``pairs``: gate and up, and down, of each expert. Raises :class:`NotNative`."""
        gated, inner = op.gated, op.down.in_features
        if gated.act not in native.ACTIVATIONS or (gated.act != "silu" and gated.alpha != 1.0):
            raise NotNative(f"its experts ({gated}) have no native calls")
        act = gated.act if gated.is_plain else None
        between = inner if gated.is_plain else 2 * inner
        up = _Calls([linear for linear, _ in pairs], op.gate_up.in_features, between, act, dtype)
        down = _Calls([linear for _, linear in pairs], inner, op.down.out_features, None, dtype)
        self._held = (pairs, up, down)  # pointed at
        self._function = getattr(kernels(), f"mix_experts_{SUFFIXES[dtype]}")
        self._top_k, self._out_features = op.top_k, op.down.out_features
        self._experts = _Experts(
            op.num_experts, op.top_k, op.gate_up.in_features, inner, op.down.out_features, up.layers, down.layers,
            0 if act else native.ACTIVATIONS[gated.act], inf if gated.limit is None else gated.limit, gated.alpha,
            gated.offset, op.weighs_inputs,
        )  # fmt: skip

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None, y: Tensor | None) -> Tensor:
        """``[rows, out]``, written to ``y`` if it is given, which may be the residual."""
        rows = x.shape[0]
        y = empty(x, "mixed", (rows, self._out_features)) if y is None else y
        order = empty(x, "expert_order", (2, rows * self._top_k), torch.int32)
        made = empty(x, "expert_rows", (rows * self._top_k, self._out_features))
        run(self._call, x, ids, weights, residual, y, order, made)
        return y

    def _call(
        self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None, y: Tensor, order: Tensor, made: Tensor
    ) -> NativeCall:
        assert x.stride(1) == 1 and ids.is_contiguous() and weights.is_contiguous() and y.is_contiguous()
        assert residual is None or residual.is_contiguous()
        found: NativeCall = self._function.at(
            ctypes.addressof(self._experts), x.shape[0], x.data_ptr(), x.stride(0), ids.data_ptr(),
            weights.data_ptr(), native.pointer(residual), y.data_ptr(), order.data_ptr(), made.data_ptr(),
        )  # fmt: skip
        return found


class _Calls:
    """One kind of layer of all experts, to be called for any rows."""

    def __init__(
        self, linears: Sequence[PackedLinear], in_features: int, out_features: int, act: str | None, dtype: torch.dtype
    ) -> None:
        """Raises :class:`NotNative`."""
        x = torch.empty(1, in_features + ROW_ALIGNMENT, dtype=dtype)[:, :in_features]
        y = torch.empty(1, out_features + ROW_ALIGNMENT * (act is not None), dtype=dtype)[:, :out_features]
        made = [linear.native(x, y, act=act) for linear in linears if linear.native]
        moves = {call.moves for call in made}
        if len(made) < len(linears) or len(moves) > 1 or None in moves:
            raise NotNative(f"its experts ({linears[0].label}) have no native calls for other rows")
        self._table = calls.table(made)
        self.layers = _Layers(ctypes.addressof(self._table), *moves.pop(), x.stride(0), y.stride(0))  # type: ignore[misc]
