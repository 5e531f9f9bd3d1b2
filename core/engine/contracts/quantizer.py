"""Slot ``quantizer``: how is this weight stored and read?

A quantizer turns the checkpoint tensors of a linear layer into a weight that is data: a :class:`PlainWeight`, a
:class:`QuantizedWeight`, or a :class:`CustomWeight` in a format of its own. The core's kernels choose how they multiply
it, and in what layout. Loading, naming, sharding and fusion are the core's, too: it hands over the parts of a fused
projection (q, k, v) separately, because they may have different scales.

What is made is looked at before the engine computes with it: sizes, and one product of the first two layers of each
kind. ``pack`` and the functions of a :class:`CustomWeight` are called on the device's thread under
``torch.inference_mode()``; what is asked before loading, in the main thread of the engine process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from engine.contracts.ops import LinearSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class WordLoader:
    """How a thread reads its part of a tile of 16 channels and 128 inputs: for weights of 4 or 8 bits, in groups of 128
    inputs or whole tiles of them, or of 32 inputs. See :mod:`engine.kernels.triton.fragments` for which thread has
    which inputs.

    Two ``@triton.jit`` functions. ``load(weight_ptr, rows, tile, quarter, mask, IN_FEATURES)``: int32 words of channel
    ``rows``, ``count`` of them, 4 or 8; all arguments but the first and last are ``[threads]``. ``unpack(word,
    number)``: the numbers of a word in pairs of bfloat16, ``16 / count`` words. ``number``: the group's zero, int32,
    to be subtracted, or ``None``; scales are the kernel's. A group of 32 inputs is a thread's four words of a channel:
    there ``number`` is what is stored as its scale, uint8 as int32, and ``unpack`` multiplies by it.
    """

    load: Any
    unpack: Any
    count: int


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

    ``DTYPE`` of ``unpack_tile`` is the dtype that is multiplied in: float32 for one row. Factors of groups of inputs
    may be left to the kernels, which multiply sums by them where they can: ``tile_scale(loaded)``, float32
    ``[BLOCK_N, groups]``, with as many groups of equal size as a tile has, times the tile of ``unpack_tile`` are the
    weights.

    ``words``: how tensor cores read it that multiply up to 16 bfloat16 rows; ``None``: by these functions, too.

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
    words: WordLoader | None = None

    def bits_per_weight(self, in_features: int, out_features: int) -> int:
        """Bits a weight takes in memory, scales apart, rounded down."""
        return int(self.weight.numel() * self.weight.element_size() * 8 // (in_features * out_features))


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A weight that is not quantized. ``weight``: ``[out, in]``, ``bias``: ``[out]`` or ``None``, in any floating
    dtype: the core turns them into the compute dtype. A tied head's weight is on the device in it already, and stays
    shared."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def out_features(self) -> int:
        return int(self.weight.shape[0])

    @property
    def in_features(self) -> int:
        return int(self.weight.shape[1])


@dataclass(frozen=True, slots=True)
class CustomWeight:
    """A weight in a format that the core does not know. It is multiplied by torch, unpacked in every call, and on a GPU
    up to 16 rows by the core's fused kernels, if there is a ``tile_loader``.

    ``tensors``: contiguous, on the CPU: the core moves them to the device and hands them to the functions, by name.
    ``dense(tensors)``: float32 ``[out, in]``, in plain torch, on any device: the definition.
    ``tile_loader(tensors)``: how fused kernels read them. ``None``: nothing is fused with the layer.
    ``bias``: float32 ``[out]`` or ``None``; the ``tile_loader`` has none. ``label``: for the plan.
    """

    tensors: Mapping[str, Tensor]
    out_features: int
    in_features: int
    dense: Callable[[Mapping[str, Tensor]], Tensor]
    tile_loader: Callable[[Mapping[str, Tensor]], TileLoader] | None = None
    bias: Tensor | None = None
    label: str = "custom"


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight in few bits: the core's backends have kernels for it.

    ``weight[o, i] = (codes[o, i] - zero[o, g]) * scale[o, g]`` with ``g = i // group_size``.

    ``codes``: ``[out, in]``, contiguous: int8 in ``-2**(bits-1) .. 2**(bits-1) - 1``, one byte each whatever ``bits``
    is, or float8_e4m3fn. With ``e2m1``: int8, twice a number of 4 bits (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their
    negatives), beside scales that are half of the format's; ``bits`` is 4.
    ``scale``: float32 ``[out, ceil(in / group_size)]``; a weight with one scale per output channel has
    ``group_size == in``.
    ``zero``: shaped as ``scale``: int8, or float32 for offsets between two codes (GGUF's K-quants), which torch alone
    multiplies; or ``None`` for symmetric weights and for floating codes.
    ``bits``: 4 or 8, what a code takes in kernels. ``order``: int64 ``[in]`` or ``None``: column ``i`` multiplies input
    feature ``order[i]`` (the activation order of GPTQ). ``bias``: float32 ``[out]`` or ``None``.
    ``input_quant``: to what inputs are rounded, each row with a scale of its own, where kernels multiply in 8 bits.
    ``note``: for the plan, after what runs.

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
        if self.zero is not None and str(self.zero.dtype) not in ("torch.int8", "torch.float32"):
            raise ValueError(f"zeros of {self.zero.dtype}, expected int8 or float32")
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
    def float_zeros(self) -> bool:
        """Zeros that are no codes."""
        return self.zero is not None and self.zero.is_floating_point()

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


Weight = PlainWeight | QuantizedWeight | CustomWeight
"""What a quantizer makes of a linear layer's tensors."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """What is known of a weight in few bits before it is loaded: memory is planned with it.

    ``bits`` of a code and ``group_size``: as of :class:`QuantizedWeight`; a :class:`CustomWeight` (``custom``) takes so
    many ``bits`` for each weight and ``scale_bytes`` for each group. ``floating``: codes are floating-point numbers.
    ``zeros``: there are zero points; ``ordered``: there is an order of inputs. ``scale_bytes``: of a scale on a GPU.
    ``input_quant``: as of :class:`QuantizedWeight`.
    """

    bits: int
    group_size: int
    floating: bool = False
    zeros: bool = False
    ordered: bool = False
    scale_bytes: int = 4
    custom: bool = False
    input_quant: Literal["int8", "fp8"] | None = None


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where the core keeps weights as its kernels read them, for the next start: of a quantizer that takes long.

    ``cache``: ``auto`` (the user's own folder), ``none``, or the absolute path of a folder; ``limit``: bytes of all
    models' weights there. ``name``: the model and the quantizer, in words; ``maker``: everything that decides what the
    quantizer makes of equal tensors, such as its code and settings that no :class:`WeightFormat` has.
    """

    cache: str
    limit: int
    name: str
    maker: str


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

    def format(self, spec: LinearSpec) -> WeightFormat | None:
        """What :meth:`pack` will make of this layer; ``None``: a :class:`PlainWeight`."""
        ...

    def pack(self, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]], dtype: Any, device: str) -> Weight:
        """A layer's weight: all parts, output features one part after another. On the CPU, but for what comes from
        elsewhere.

        ``parts[i]``: tensors by suffix of ``spec.parts[i]``, on the CPU in the checkpoint's dtype; they may be shared,
        and stay as they are. ``dtype`` is the torch compute dtype, ``device`` a torch device string. Where ranks share
        a layer out, ``spec`` and the tensors are this rank's share, which need not be as large as others';
        ``spec.whole`` is the layer as the checkpoint has it.

        For a moment it may take memory for the parts as stored, and once more joined: the memory plan sets so much
        aside, and for the core a copy of the weight in the compute dtype (two for kind ``gate_up``)."""
        ...


@runtime_checkable
class KeepingQuantizer(Protocol):
    """What a quantizer also has that takes long to make its weights: the core keeps them on disk from one start to the
    next."""

    keeping: Keeping


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
