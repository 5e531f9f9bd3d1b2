"""What CPU linear layers with weights in panels of 16 outputs share: their sizes, gates and ups, the call into C++."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import native
from engine.native import INT32, INT64, POINTER, Function, NativeCall, Source

PANEL = 16
"""Outputs whose weights lie together."""
PAIR = 2 * PANEL
"""Outputs that are computed together."""
MOVES = 1, 2, 4
"""Rows, x and y among the arguments of a linear: :attr:`engine.native.NativeCall.moves`."""


class PanelLinear(ctypes.Structure):
    """``PanelLinear`` of ``panel_linear.h``. One derived from it adds its fields behind these, as C++ does."""

    _fields_: ClassVar[Sequence[tuple[str, type[Any]]]] = (
        ("in_features", INT64),
        ("out_features", INT64),
        ("weight", POINTER),
        ("bias", POINTER),
        ("activation", INT32),
        ("instructions", INT32),
    )


class PanelCall:
    """``y = x @ W.T (+ bias) (+ residual)``, or its gated form, as a call of one compiled function over one weight."""

    def __init__(self, function: Function, linear: PanelLinear, in_features: int) -> None:
        """``function``: ``linear``, for the dtype of ``x``. The tensors ``linear`` points to must outlive
        the call. ``in_features``: without padding."""
        self._function = function
        self._linear = linear  # read by every call
        self._in_features, self._out_features = in_features, int(linear.out_features)

    def at(self, x: Tensor, y: Tensor, residual: Tensor | None = None) -> NativeCall:
        """``x [rows, in]``, ``y`` and ``residual`` ``[rows, out]``, which may be the same. Kernels would read and write
        other memory where shapes are others."""
        rows = len(x)
        assert x.shape == (rows, self._in_features) and y.shape == (rows, self._out_features)
        (x_stride, x_last), (y_stride, y_last) = x.stride(), y.stride()
        assert x_last == y_last == 1
        assert residual is None or (residual.shape == y.shape and residual.stride() == y.stride())
        return self._function.at(
            ctypes.addressof(self._linear), rows, x.data_ptr(), x_stride, y.data_ptr(), y_stride,
            native.pointer(residual), moves=MOVES,
        )  # fmt: skip

    def __call__(self, x: Tensor, y: Tensor, residual: Tensor | None = None) -> Tensor:
        """``y``, written."""
        self.at(x, y, residual)()
        return y


def load_linears(source: Source) -> ctypes.CDLL:
    """``source`` compiled; ``linear`` is its function of a :class:`PanelCall`. Raises
    :class:`engine.native.NativeError`."""
    # The linear; rows; x and its stride; y and its stride; the residual.
    arguments = (POINTER, INT64, POINTER, INT64, POINTER, INT64, POINTER)  # as MOVES says
    return native.load(source.file, {"linear": arguments}, source.macros)


def whole_pairs(out_features: int, gated: bool) -> int:
    """Outputs with padding: in whole pairs of panels, each half of gated ones in whole panels."""
    halves = 2 if gated else 1
    panels = halves * -(-out_features // (halves * PANEL))
    return -(-panels // 2) * PAIR


def interleaved(gate_up: Tensor) -> Tensor:
    """Rows of ``[gate, up]`` in turns of 16, each half padded to whole panels: one pair of panels then has the gates
    and the ups of the same 16 outputs. ``[2 * size, ...] -> [2 * padded, ...]``."""
    gate, up = gate_up.chunk(2)
    pad = (0, 0) * (gate_up.dim() - 1) + (0, -gate.shape[0] % PANEL)
    turns = [F.pad(half, pad).reshape(-1, PANEL, *half.shape[1:]) for half in (gate, up)]
    return torch.stack(turns, dim=1).flatten(0, 2)


def separated(turns: Tensor, size: int) -> Tensor:
    """The inverse of :func:`interleaved`."""
    pairs = turns.reshape(-1, 2, PANEL, *turns.shape[1:])
    return torch.cat((pairs[:, 0].flatten(0, 1)[:size], pairs[:, 1].flatten(0, 1)[:size]))
