"""What CPU linear layers with weights in panels of 16 outputs share: their sizes, gates and ups, the call into C++."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import native
from engine.kernels.linear import PackedLinear
from engine.native import ACTIVATIONS, INT32, INT64, POINTER, Function, NativeCall, Source

PANEL = 16
"""Outputs whose weights lie together."""
PAIR = 2 * PANEL
"""Outputs that are computed together."""
MOVES = 1, 2, 4
"""Rows, x and y among the arguments of a linear: :attr:`engine.native.NativeCall.moves`."""


class PanelLinear(ctypes.Structure):
    """``PanelLinear`` of ``panel_linear.h``. One derived from it adds its fields after these, as C++ does."""

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


class PanelLayer:
    """A linear layer whose weights lie in panels, and the calls on them. A gate and up projection has its two halves
    interleaved by 16 outputs (:func:`in_turns`)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        gated: bool,
        dtypes: Collection[torch.dtype],
        call: Callable[[torch.dtype, int, int], PanelCall],
        widened: Callable[[Tensor], Tensor] = torch.Tensor.float,
    ) -> None:
        """``dtypes``: of activations that the kernels take, what others are turned into by ``widened``; ``call(dtype,
        outputs, activation)``: made when a dtype and an activation are first asked for, as the kernels are then
        compiled. ``activation``: of :data:`engine.native.ACTIVATIONS`, 0: none."""
        self.out_features, self.gated = out_features, gated
        self._columns = 2 * (-(-out_features // PAIR) * PANEL) if gated else out_features
        self._dtypes, self._make, self._widened = dtypes, call, widened
        self._calls: dict[tuple[torch.dtype, str], PanelCall] = {}

    def apply(self, x: Tensor) -> Tensor:
        return self.in_order(self._product(x, self._columns, ""))

    def apply_add(self, x: Tensor, residual: Tensor) -> Tensor:
        if x.dtype not in self._dtypes:
            return residual.add_(self.apply(x))
        return self._call(x.dtype, "")(x, residual, residual)

    def apply_gated(self, x: Tensor, act: str) -> Tensor:
        return self._product(x, self.out_features // 2, act)

    def native(self, x: Tensor, y: Tensor, residual: Tensor | None = None, act: str | None = None) -> NativeCall:
        """See :class:`engine.kernels.linear.NativeLinear`."""
        assert self.gated == (act is not None)
        return self._call(x.dtype, act or "").at(x, y, residual)

    def in_order(self, y: Tensor) -> Tensor:
        """``[M, interleaved outputs] -> [M, out]``"""
        return separated(y.T, self.out_features // 2).T.contiguous() if self.gated else y

    def packed(
        self, tensors: Mapping[str, Tensor], reference: Callable[[Tensor], Tensor], label: str, is_native: bool = True
    ) -> PackedLinear:
        """``is_native``: what the layer does is one native call."""
        return PackedLinear(
            tensors,
            reference=reference,
            apply=self.apply,
            out_features=self.out_features,
            apply_add=None if self.gated else self.apply_add,
            apply_gated=self.apply_gated if self.gated else None,
            native=self.native if is_native else None,
            label=label,
        )

    def _product(self, x: Tensor, columns: int, act: str) -> Tensor:
        wide = x if x.dtype in self._dtypes else self._widened(x)
        return self._call(wide.dtype, act)(wide, wide.new_empty((len(x), columns))).to(x.dtype)

    def _call(self, dtype: torch.dtype, act: str) -> PanelCall:
        found = self._calls.get((dtype, act))
        if found is None:
            columns = self.out_features // 2 if act else self._columns
            found = self._make(dtype, columns, ACTIVATIONS[act] if act else 0)
            self._calls[dtype, act] = found
        return found


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


def in_turns(outputs: Tensor, gated: bool) -> Tensor:
    """``[out, ...]``, gates and ups interleaved, filled with zeros to whole pairs of panels."""
    outputs = interleaved(outputs) if gated else outputs
    pad = (0, 0) * (outputs.dim() - 1) + (0, -outputs.shape[0] % PAIR)
    return F.pad(outputs, pad).contiguous() if pad[-1] else outputs.contiguous()  # padding copies


def interleaved(gate_up: Tensor) -> Tensor:
    """Rows of ``[gate, up]`` interleaved by 16, each half padded to whole panels: one pair of panels then has the gates
    and the ups of the same 16 outputs. ``[2 * size, ...] -> [2 * padded, ...]``."""
    gate, up = gate_up.chunk(2)
    pad = (0, 0) * (gate_up.dim() - 1) + (0, -gate.shape[0] % PANEL)
    halves = [F.pad(half, pad).reshape(-1, PANEL, *half.shape[1:]) for half in (gate, up)]
    return torch.stack(halves, dim=1).flatten(0, 2)


def separated(outputs: Tensor, size: int) -> Tensor:
    """The inverse of :func:`interleaved`."""
    pairs = outputs.reshape(-1, 2, PANEL, *outputs.shape[1:])
    return torch.cat((pairs[:, 0].flatten(0, 1)[:size], pairs[:, 1].flatten(0, 1)[:size]))
