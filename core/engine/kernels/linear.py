"""A linear layer ready to run: what kernels make of a quantizer's weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from engine.contracts.quantizer import TileLoader
from engine.native import NativeCall


class NativeLinear(Protocol):
    """A linear layer as one call of a native function, for programs on a CPU (:mod:`engine.native`)."""

    def __call__(self, x: Tensor, y: Tensor, residual: Tensor | None = None, act: str | None = None) -> NativeCall:
        """The call that computes ``y = x @ W.T (+ bias) (+ residual)``; for a spec of kind ``gate_up`` always with
        ``act``, ``silu`` or ``gelu_tanh``: ``y = act(gate) * up``. Nothing is computed yet, and the contents of the
        tensors mean nothing.

        ``x [M, in]``, ``y`` and ``residual [M, out]``, which may be the same, in the compute dtype; their rows are
        contiguous. What else the call points at lives as long as the layer. Experts are called natively only if the
        call says how it is made for other rows: :attr:`engine.native.NativeCall.moves`.
        """
        ...


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer ready to run: ``y = x @ W.T (+ bias)``.

    ``reference(x)``: plain torch, any device, the definition of the result, 8-bit inputs rounded as ``apply`` rounds
    them. ``[M, in] -> [M, sum(out)]`` in the
    dtype of ``x``.
    ``apply(x)``: the fastest way there is on this device; equal to ``reference`` within rounding. Returns
    new, contiguous memory that the caller may overwrite.
    ``apply_add(x, residual)``: ``residual + apply(x)`` in one kernel, perhaps in the memory of ``residual``; or
    ``None``.
    ``apply_gated(x, act)``: for a spec of kind ``gate_up``, ``act(gate) * up`` ``[M, out / 2]`` of the two halves of
    ``apply(x)`` in one kernel, for ``execution=compile``; ``act``: ``silu`` or ``gelu_tanh``. Or ``None``.
    ``native``: the same as a native call, or ``None``: then steps of few tokens run op by op on a CPU, all of them, and
    start-up says so.
    ``tile_loader``: how fused kernels read the weights, or ``None``: then nothing is fused with this layer.
    ``input_quant``: for more rows than the fused kernels serve, the layer takes its input in 8 bits, int8 or
    float8_e4m3fn codes ``[M, in]`` and a float32 step for each row ``[M, 1]``, by ``apply_quantized(codes, step,
    dtype)``, which returns ``[M, sum(out)]`` in ``dtype``: where a kernel norms the input, it rounds it too. ``apply``
    does the same to an input that nothing norms. Or ``None``, both.
    """

    tensors: Mapping[str, Tensor]
    reference: Callable[[Tensor], Tensor]
    apply: Callable[[Tensor], Tensor]
    out_features: int
    """Of this rank: rows of the weight that was packed."""
    apply_add: Callable[[Tensor, Tensor], Tensor] | None = None
    apply_gated: Callable[[Tensor, str], Tensor] | None = None
    native: NativeLinear | None = None
    tile_loader: TileLoader | None = None
    input_quant: Literal["int8", "fp8"] | None = None
    apply_quantized: Callable[[Tensor, Tensor, Any], Tensor] | None = None
    label: str = ""
    """What runs, for the plan: for example ``bfloat16 panels, AVX512-BF16``."""

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())
