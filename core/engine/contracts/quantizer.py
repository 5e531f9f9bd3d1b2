"""Slot ``quantizer``: how is this weight stored and multiplied?

A quantizer turns the checkpoint tensors of a linear layer into a :class:`PackedLinear`. Loading, naming, sharding
and fusion are the core's: it hands over the parts of a fused projection (q, k, v) separately, because they may
have different scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from engine.contracts.ops import LinearSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer ready to run: ``y = x @ W.T (+ bias)``.

    ``reference(x)``: plain torch, any device, the definition of the result. ``[M, in] -> [M, sum(out)]`` in the
    dtype of ``x``.
    ``apply(x)``: the fastest way this quantizer knows on this device; equal to ``reference`` within rounding. Returns
    new, contiguous memory that the caller may overwrite.
    ``apply_add(x, residual)``: ``residual + apply(x)`` in one kernel, perhaps in the memory of ``residual``; or
    ``None``.
    ``apply_gated(x, act)``: for a spec of kind ``gate_up``, ``act(gate) * up`` ``[M, out / 2]`` of the two halves of
    ``apply(x)`` in one kernel, for ``execution=compile``; ``act`` as in
    :class:`~engine.contracts.ops.NormGateUpAct`. Or ``None``.
    ``load_tile``: a Triton function that fused kernels inline to load and dequantize a weight tile, or ``None``.
    ``input_quant``: 8-bit per-token quantization the preceding op should fuse into its output, or ``None``.
    ``good_m``: range of rows for which the kernels of this quantizer are a good choice.
    """

    tensors: Mapping[str, Tensor]
    reference: Callable[[Tensor], Tensor]
    apply: Callable[[Tensor], Tensor]
    out_features: int
    apply_add: Callable[[Tensor, Tensor], Tensor] | None = None
    apply_gated: Callable[[Tensor, str], Tensor] | None = None
    load_tile: Any | None = None
    input_quant: Literal["int8", "fp8"] | None = None
    good_m: tuple[int, int] = (1, 1 << 30)
    label: str = ""
    """What runs, for the plan: for example ``bf16 oneDNN prepacked``."""

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One checkpoint tensor of a linear part, and how it may be cut for tensor parallelism.

    ``shard_axes`` maps ``"out"`` or ``"in"`` to the tensor's axis; ``quantum`` is the smallest cut along it, in
    elements of that axis. A missing axis cannot be cut.
    """

    suffix: str
    shard_axes: Mapping[str, int] = field(default_factory=dict)
    quantum: int = 1
    optional: bool = False


@runtime_checkable
class Quantizer(Protocol):
    """The plugin."""

    lossless: bool
    """True when weights keep the checkpoint's values."""

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        """Checkpoint tensors each part of this layer has, by suffix (``weight``, ``bias`` ...)."""
        ...

    def pack(self, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]], dtype: Any, device: str) -> PackedLinear:
        """``parts[i]``: tensors by suffix of ``spec.parts[i]``, on the CPU in the checkpoint's dtype.
        ``dtype`` is the torch compute dtype, ``device`` a torch device string."""
        ...
