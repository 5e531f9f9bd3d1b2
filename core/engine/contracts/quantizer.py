"""Slot ``quantizer``: how is this weight stored and multiplied?

A quantizer turns the checkpoint tensors of a linear layer into a :class:`PackedLinear`. Loading, naming, sharding
and fusion are the core's: it hands over the parts of a fused projection (q, k, v) separately, because they may
have different scales.

What is made is tried before the engine computes with it: one layer of each kind (shape, label, dtypes of its tensors),
with 1, 3, 17 and 40 rows of random inputs. ``pack`` and the functions of a :class:`PackedLinear` are called on the
device's thread under ``torch.inference_mode()``; what is asked before loading, in the main thread of the engine
process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from engine.contracts.ops import LinearSpec

if TYPE_CHECKING:
    from torch import Tensor

    from engine.native import NativeCall


@dataclass(frozen=True, slots=True)
class TileLoader:
    """How fused kernels read a weight: tile by tile, dequantized in registers.

    ``load_tile`` is a ``@triton.jit`` function that the kernels take as a compile-time argument and inline:

    .. code-block:: python

        @triton.jit
        def load_tile(weight_ptr, scale_ptr, zero_ptr, rows, real, start,
                      IN_FEATURES: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr):
            ...

    It returns ``[BLOCK_N, BLOCK_K]`` in ``DTYPE`` (the dtype of the activations): the weights of output channels
    ``rows`` (int64 ``[BLOCK_N]``, in any order) and input features ``start .. start + BLOCK_K``. ``start`` is a
    multiple of ``BLOCK_K``, a power of two of at least 32, so that a packed format loads whole words and unpacks them
    (``tl.join``) instead of loading a word once per value. Where the bool ``real [BLOCK_N]`` is False, and from
    ``IN_FEATURES`` on, nothing may be loaded and the tile must be 0: not merely unused, since 0 * NaN is NaN. It may be
    called before the previous kernel has ended, so it may read these tensors and nothing else.

    A format that takes arithmetic to unpack splits it: ``load_tile`` then returns what it loaded, a tensor or a tuple
    of tensors, and ``unpack_tile`` makes the tile of it. Kernels for one row keep two loaded tiles on their way while
    a third is unpacked and multiplied; what ``load_tile`` computed would have to arrive first.

    .. code-block:: python

        @triton.jit
        def unpack_tile(loaded, DTYPE: tl.constexpr):
            ...

    ``DTYPE`` of ``unpack_tile`` is the dtype that is multiplied in: float32 for one row. Where one scale serves a
    channel's whole tile, the sums of the tile may be multiplied by it instead of its weights, which then are not even
    rounded: ``tile_scale(loaded)``, float32 ``[BLOCK_N, 1]``, times the tile of ``unpack_tile`` are the weights.

    ``weight``, ``scale``, ``zero``: handed to ``load_tile`` as they are; a format without them has ``None``.
    ``channel_scale``: float32 ``[out]``, applied to the sums, once per output instead of once per weight.
    ``bias``: ``[out]``, any floating dtype, added last. ``group_size``: input features that share a scale, for
    ``load_tile``. All tensors are contiguous and never change.
    """

    load_tile: Any
    weight: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None
    channel_scale: Tensor | None = None
    bias: Tensor | None = None
    group_size: int = 0
    unpack_tile: Any | None = None
    tile_scale: Any | None = None

    def bits_per_weight(self, in_features: int, out_features: int) -> int:
        """Bits a weight takes in memory, scales apart, rounded down."""
        return int(self.weight.numel() * self.weight.element_size() * 8 // (in_features * out_features))


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
    ``apply(x)``: the fastest way this quantizer knows on this device; equal to ``reference`` within rounding. Returns
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
    ``good_m``: range of rows for which the kernels of this quantizer are a good choice.
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
    good_m: tuple[int, int] = (1, 1 << 30)
    label: str = ""
    """What runs, for the plan: for example ``bf16 oneDNN prepacked``."""

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized weight as data: the core's backends have kernels for it.

    ``weight[o, i] = (codes[o, i] - zero[o, g]) * scale[o, g]`` with ``g = i // group_size``.

    ``codes``: ``[out, in]``, contiguous: int8 in ``-2**(bits-1) .. 2**(bits-1) - 1``, one byte each whatever ``bits``
    is, or float8_e4m3fn. With ``e2m1``: int8, twice a number of 4 bits (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their
    negatives), beside scales that are half of the format's; ``bits`` is 4.
    ``scale``: float32 ``[out, ceil(in / group_size)]``; a weight with one scale per output channel has
    ``group_size == in``.
    ``zero``: int8, shaped as ``scale``, or ``None`` for symmetric weights and for floating codes.
    ``bits``: 4 or 8, what a code takes in kernels. ``order``: int64 ``[in]`` or ``None``: column ``i`` multiplies input
    feature ``order[i]`` (the activation order of GPTQ). ``bias``: float32 ``[out]`` or ``None``.
    ``input_quant``: to what inputs are rounded, each row with a scale of its own, where kernels multiply in 8 bits.
    ``note``: for the plan, behind what runs.

    Raises ``ValueError`` where these do not fit together.
    """

    codes: Tensor
    scale: Tensor
    group_size: int
    bits: int = 8
    zero: Tensor | None = None
    order: Tensor | None = None
    bias: Tensor | None = None
    e2m1: bool = False
    input_quant: Literal["int8", "fp8"] | None = None
    note: str = ""

    def __post_init__(self) -> None:
        out, inputs = self.codes.shape
        dtype = str(self.codes.dtype).removeprefix("torch.")
        if dtype not in ("int8", "float8_e4m3fn"):
            raise ValueError(f"codes of {self.codes.dtype}, expected int8 or float8_e4m3fn")
        if self.e2m1 and (dtype != "int8" or self.bits != 4 or self.zero is not None):
            raise ValueError(f"e2m1 of {self.bits} bits and {self.codes.dtype}, expected int8 codes of 4 without zeros")
        if self.group_size < 1:
            raise ValueError(f"groups of {self.group_size} inputs, expected at least 1")
        groups = (out, -(-inputs // self.group_size))
        if tuple(self.scale.shape) != groups:
            raise ValueError(f"scales {list(self.scale.shape)} for weights [{out}, {inputs}], expected {list(groups)}")
        if self.zero is not None and self.zero.shape != self.scale.shape:
            raise ValueError(f"zeros {list(self.zero.shape)} beside scales {list(self.scale.shape)}")
        if self.order is not None and tuple(self.order.shape) != (inputs,):
            raise ValueError(f"an order of {list(self.order.shape)} for {inputs} input features")
        if self.bias is not None and tuple(self.bias.shape) != (out,):
            raise ValueError(f"bias {list(self.bias.shape)} for {out} outputs")

    @property
    def out_features(self) -> int:
        return int(self.codes.shape[0])

    @property
    def in_features(self) -> int:
        return int(self.codes.shape[1])

    @property
    def floating(self) -> bool:
        """Codes are floating-point numbers: e4m3, or e2m1 of 4 bits."""
        return self.e2m1 or self.codes.is_floating_point()

    @property
    def kind(self) -> str:
        """For labels."""
        return "fp4" if self.e2m1 else "fp8" if self.floating else f"int{self.bits}"

    @property
    def per_channel(self) -> bool:
        """One scale per output channel."""
        return self.scale.shape[1] == 1

    def dense(self) -> Tensor:
        """float32 ``[out, in]``: the weights this stands for, input features in the model's order."""
        wide = self.codes.float()
        if self.zero is not None:
            wide -= self._by_column(self.zero.float())
        wide *= self._by_column(self.scale)
        if self.order is None:
            return wide
        in_order = wide.new_empty(wide.shape)
        in_order[:, self.order] = wide
        return in_order

    def _by_column(self, grouped: Tensor) -> Tensor:
        """``[out, groups]`` -> ``[out, in]``, or ``[out, 1]`` where all inputs share a group."""
        if self.per_channel:
            return grouped
        return grouped.repeat_interleave(self.group_size, dim=1)[:, : self.in_features]

    def to(self, device: Any) -> QuantizedWeight:
        """The same on another device."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return replace(
            self,
            codes=self.codes.to(device),
            scale=self.scale.to(device),
            zero=moved(self.zero),
            order=moved(self.order),
            bias=moved(self.bias),
        )


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One checkpoint tensor of a linear part, and how ranks share it out.

    ``shard_axes`` maps ``"out"`` or ``"in"`` to the tensor's axis along which the layer's output or input features lie;
    ``per_entry``: how many of them one entry of that axis stands for, where it is not one (codes of a word, a group
    that shares a scale); the last entry may stand for fewer. No cut goes through an entry, but along an axis in
    ``overlapping``: there several ranks read an entry that each has a part of. Nor does one go through ``together``
    features, where more than an entry's are rounded together. ``replicated``: of ``"out"``
    and ``"in"``, those along which every rank keeps the whole tensor (a scale per output channel, when inputs are cut).
    What is in neither cannot be cut, for the reason in ``uncuttable``.

    ``optional``: may be missing. ``extra``: for a ``bias``, may also be there where the architecture has none; it is
    handed over, and its quantizer checks that it adds nothing.
    """

    suffix: str
    shard_axes: Mapping[str, int] = field(default_factory=dict)
    per_entry: Mapping[str, int] = field(default_factory=dict)
    optional: bool = False
    replicated: tuple[str, ...] = ()
    uncuttable: str = ""
    extra: bool = False
    together: Mapping[str, int] = field(default_factory=dict)
    overlapping: tuple[str, ...] = ()


UNQUANTIZED = (StoredTensor("weight", {"out": 0, "in": 1}), StoredTensor("bias", {"out": 0}, optional=True))
"""What a part has in a checkpoint whose weights are stored as they are."""


@dataclass(frozen=True, slots=True)
class StoredHeader:
    """What a checkpoint's header says of a tensor, unread. ``dtype``: name of the torch dtype, ``float8_e4m3fn``."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVScaleNames:
    """Names of checkpoint tensors that may hold the scales of one layer's cached keys and values; the first that exists
    counts. A scale is what a stored key or value is multiplied by: one number, or one for each KV head.

    ``ignored``: names that belong to these scales and are not needed.
    """

    key: tuple[str, ...] = ()
    value: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return self.key + self.value + self.ignored


@runtime_checkable
class Quantizer(Protocol):
    """The plugin."""

    lossless: bool
    """True when weights keep the checkpoint's values."""

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        """Checkpoint tensors each part of this layer has, by suffix (``weight``, ``bias`` ...)."""
        ...

    def pack(
        self, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]], dtype: Any, device: str
    ) -> PackedLinear | QuantizedWeight:
        """A weight as data, on the CPU, of which the core packs what its kernels read; or, from a quantizer with
        kernels of its own, packed already.

        ``parts[i]``: tensors by suffix of ``spec.parts[i]``, on the CPU in the checkpoint's dtype.
        ``dtype`` is the torch compute dtype, ``device`` a torch device string. Where ranks share a layer out,
        ``spec`` and the tensors are this rank's share, which need not be as large as others'; ``spec.whole`` is the
        layer as the checkpoint has it.

        Beside the result it may take, for a moment, memory for the parts as stored, once more joined, and one copy of
        the weight in the compute dtype (two for kind ``gate_up``): the memory plan sets so much aside, and no more."""
        ...


@runtime_checkable
class SizedQuantizer(Protocol):
    """What a quantizer also has whose packed weights are not simply the checkpoint's tensors in the compute dtype: the
    core then knows before loading whether the model fits."""

    def packed_bytes(self, spec: LinearSpec, dtype: Any, device: str, tied: bool) -> int:
        """Bytes that :meth:`Quantizer.pack` would add to memory for this layer, from shapes alone. ``dtype`` and
        ``device`` as there.

        ``tied``: its one weight is the embedding's, on the device in the compute dtype already; a quantizer that
        keeps it as it is adds nothing.
        """
        ...


@runtime_checkable
class CheckingQuantizer(Protocol):
    """What a quantizer also has that can tell from headers whether it can read a checkpoint, before anything is
    loaded."""

    def problems(self, specs: Sequence[LinearSpec], headers: Mapping[str, StoredHeader]) -> Sequence[str]:
        """Everything that is wrong, one line each: layers that are fused but stored differently, dtypes, shapes.

        ``specs``: all linear layers that are read; ``headers``: every tensor of the checkpoint by name. A required
        tensor that is missing is the core's to report.
        """
        ...


@runtime_checkable
class UnpackingQuantizer(Protocol):
    """What a quantizer also has that can take weights out of the form in which they are stored, for ops that read them
    as they are: projections of single heads. Without it these must be stored unquantized."""

    def unpacked(self, spec: LinearSpec, part: Mapping[str, Tensor]) -> Tensor:
        """float32 ``[out, in]`` on the CPU: the weights that the tensors of the only part of ``spec`` stand for."""
        ...


@runtime_checkable
class KVScaleReader(Protocol):
    """What a quantizer also has whose checkpoints may bring scales for the KV cache."""

    def kv_scale_names(self, qkv: LinearSpec) -> KVScaleNames:
        """For one layer. ``qkv``: what makes its keys: the parts q, k and v, or one that the checkpoint has fused."""
        ...
