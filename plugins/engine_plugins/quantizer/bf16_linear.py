"""bfloat16 linear layers on CPUs: one layout of the weights for every number of rows, read once from end to end."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import native
from engine.contracts.ops import LinearSpec
from engine.contracts.provider import BuildContext
from engine.contracts.quantizer import PackedLinear
from engine.native import ACTIVATIONS, INT32, INT64, POINTER

PANEL = 16
"""Outputs whose weights lie together."""
INPUT_MULTIPLE = 32
"""``in_features`` must be one: the inputs an AMX tile takes at once."""


INSTRUCTIONS = ("plain C++", "AVX2", "AVX512-BF16", "AMX-BF16")
"""By the numbers ``bf16_linear.cpp`` gives them."""


class _Linear(ctypes.Structure):
    """``Linear`` of ``bf16_linear.cpp``."""

    _fields_ = (
        ("in_features", INT64),
        ("out_features", INT64),
        ("weight", POINTER),
        ("bias", POINTER),
        ("activation", INT32),
        ("instructions", INT32),
    )


@cache
def kernels() -> ctypes.CDLL:
    """The compiled functions. Raises :class:`engine.native.NativeError`."""
    arguments = (POINTER, INT64, POINTER, INT64, POINTER, INT64, POINTER)
    return native.load(Path(__file__).with_suffix(".cpp"), {"linear": arguments})


def wanted(context: BuildContext) -> bool:
    """Whether a plan computes its linear layers here."""
    return context.device.kind == "cpu" and context.execution == "compile" and context.dtype == "bfloat16"


def to_panels(weight: Tensor) -> Tensor:
    """``[out, in]`` -> ``[panels, in / 2, 16, 2]``, an even number of panels, zeros beyond ``out``."""
    out, inputs = weight.shape
    padded = F.pad(weight, (0, 0, 0, -out % (2 * PANEL)))
    return padded.view(-1, PANEL, inputs // 2, 2).transpose(1, 2).contiguous()


def from_panels(panels: Tensor, out_features: int) -> Tensor:
    """The inverse of :func:`to_panels`."""
    return panels.transpose(1, 2).reshape(-1, 2 * panels.shape[1])[:out_features]


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


def pack_bf16(spec: LinearSpec, weight: Tensor, bias: Tensor | None, instructions: str | None = None) -> PackedLinear:
    """``weight``: bfloat16 ``[out, in]``; ``bias``: ``[out]`` in any float type, or ``None``.

    ``instructions``: one of :data:`INSTRUCTIONS`, by default the best there are.
    """
    instructions = instructions or INSTRUCTIONS[kernels().best_instructions()]
    layer = _Layer(weight, bias, spec.kind == "gate_up", instructions)
    return PackedLinear(
        layer.tensors,
        reference=layer.reference,
        apply=layer.apply,
        out_features=layer.out_features,
        apply_add=None if layer.gated else layer.apply_add,
        apply_gated=layer.apply_gated if layer.gated else None,
        label=f"bfloat16 panels, {instructions}",
    )


def packed_bytes(spec: LinearSpec) -> int:
    """Bytes of what :func:`pack_bf16` keeps: whole pairs of panels, and a float32 bias."""
    halves = 2 if spec.kind == "gate_up" else 1  # each of them in whole panels
    panels = halves * -(-spec.out_features // (halves * PANEL))
    padded = -(-panels // 2) * 2 * PANEL
    bias = padded * torch.float32.itemsize if any(part.bias for part in spec.parts) else 0
    return padded * spec.in_features * torch.bfloat16.itemsize + bias


class _Layer:
    """Weights in panels and the calls on them. A gate and up projection keeps its two halves in turns."""

    def __init__(self, weight: Tensor, bias: Tensor | None, gated: bool, instructions: str) -> None:
        self.out_features, self.in_features = weight.shape
        self.gated = gated
        self._instructions = INSTRUCTIONS.index(instructions)
        if gated:
            weight = interleaved(weight)
            bias = None if bias is None else interleaved(bias)
        self._panels = to_panels(weight)
        self._columns = weight.shape[0]
        self._bias = None if bias is None else F.pad(bias.float(), (0, -bias.shape[0] % (2 * PANEL)))
        self._plain = self._structure(self._columns, 0)
        self._activated = {name: self._structure(self.out_features // 2, code) for name, code in ACTIVATIONS.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        bias = {} if self._bias is None else {"bias": self._bias}
        return {"weight": self._panels} | bias

    def _structure(self, columns: int, activation: int) -> _Linear:
        bias = native.pointer(self._bias)
        return _Linear(self.in_features, columns, self._panels.data_ptr(), bias, activation, self._instructions)

    def reference(self, x: Tensor) -> Tensor:
        """Plain ``F.linear`` on the weights taken back out of their layout; keeps no second copy."""
        bias = None if self._bias is None else self._bias[: self._columns].to(x.dtype)
        return self._in_order(F.linear(x, from_panels(self._panels, self._columns), bias))

    def apply(self, x: Tensor) -> Tensor:
        y = x.new_empty(x.shape[0], self._columns)
        return self._in_order(_call(self._plain, x, y, None))

    def apply_add(self, x: Tensor, residual: Tensor) -> Tensor:
        return _call(self._plain, x, residual, residual)

    def apply_gated(self, x: Tensor, act: str) -> Tensor:
        return _call(self._activated[act], x, x.new_empty(x.shape[0], self.out_features // 2), None)

    def _in_order(self, y: Tensor) -> Tensor:
        return separated(y.T, self.out_features // 2).T.contiguous() if self.gated else y


def _call(layer: _Linear, x: Tensor, y: Tensor, residual: Tensor | None) -> Tensor:
    assert x.dtype == torch.bfloat16 and x.stride(1) == 1
    kernels().linear(
        ctypes.addressof(layer), x.shape[0], x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0),
        native.pointer(residual),
    )  # fmt: skip
    return y
