"""Typed operations: what a model computes, one step of its paper each.

A value is ``[num_tokens, features]``; heads lie one after another in it. An op says what is computed of its inputs and
which tensors of the checkpoint it reads, and nothing of how: the core finds kernels for single ops and for sequences of
them. Architectures call :class:`engine.contracts.graph.Builder`, which makes them or takes one with many fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple

Act = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
"""``gelu``: with the error function; ``gelu_tanh``: its approximation (both arXiv 1606.08415); ``relu2``: the square of
relu (arXiv 2109.08668)."""


Range = tuple[int, int]
"""The first, and the one behind the last."""


class Cut(NamedTuple):
    """What one rank has of something that ranks share out: ``start .. stop`` of ``whole``."""

    start: int
    stop: int
    whole: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class HeldExperts:
    """The experts of a layer that one rank has: ``numbers``, ascending, of ``whole``."""

    numbers: tuple[int, ...]
    whole: int

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The same numbers, as ranges that do not touch."""
        runs = [list(run) for _, run in groupby(enumerate(self.numbers), lambda pair: pair[1] - pair[0])]
        return tuple((run[0][1], run[-1][1] + 1) for run in runs)


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One projection as the checkpoint stores it: ``{name}.weight`` is ``[out_features, in_features]``."""

    name: str
    out_features: int
    bias: bool = False
    slices: tuple[int, ...] = ()
    """Sizes of what lies one after another along the output, where the checkpoint has fused it (q, k and v; gate and
    up): each is a value of its own. Their sum is ``out_features``."""

    @property
    def outputs(self) -> tuple[int, ...]:
        """Sizes of the values that it makes."""
        return self.slices or (self.out_features,)


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One multiplication; several parts share their input and are fused along the output."""

    parts: tuple[LinearPart, ...]
    in_features: int
    shard: Literal["out", "in", "none"] = "none"
    """Axis that tensor parallelism cuts: ``out`` for q/k/v, gate/up and the head; ``in`` for o and down."""
    kind: Literal["body", "gate_up", "head"] = "body"
    """``gate_up``: two outputs of equal size, gate and up, of which ``act(gate) * up`` is computed: set by the core
    where it has a kernel for that."""
    share: Share | None = None
    """Set by the core for a layer that ranks share out: sizes are then those of one rank's share."""

    @property
    def whole(self) -> LinearSpec:
        """The layer as the checkpoint has it."""
        return self if self.share is None else replace(self.share.whole, kind=self.kind)

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    @property
    def outputs(self) -> tuple[int, ...]:
        """Sizes of the values that it makes."""
        return tuple(size for part in self.parts for size in part.outputs)


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank has of a linear layer."""

    whole: LinearSpec
    rows: tuple[tuple[Range, ...], ...]
    """By part, its output features, in order: several ranges of a part that the checkpoint has fused."""
    columns: Range | None = None
    """Its input features; ``None``: all. Outputs are then summands, and only who has the first feature adds biases."""


@dataclass(frozen=True, slots=True)
class Embed:
    """``tokens -> [num_tokens, size]``: rows of ``{name}.weight [vocab_size, size]``."""

    name: str
    vocab_size: int
    size: int
    rows: Cut | None = None
    """Of one rank; other tokens' rows are 0. ``None``: all."""


@dataclass(frozen=True, slots=True)
class Norm:
    """Norm over each ``size`` features of the input, computed in float32 and cast once.

    ``rms`` (arXiv 1910.07467): ``x / sqrt(mean(x^2) + eps) * (offset + weight)``; ``layer`` (arXiv 1607.06450): the
    same of ``x - mean(x)``, plus ``{name}.bias`` where ``bias`` says so. ``{name}.weight [size]``; without a name
    there is no weight. An input of several times ``size`` features is so many heads, each normed by itself; with
    ``by_head`` each has a weight of its own, ``{name}.weight [heads, size]``.
    """

    kind: Literal["rms", "layer"]
    name: str | None
    size: int
    eps: float
    offset: float = 0.0
    bias: bool = False
    by_head: int = 0
    """Heads with a weight each; 0: all share one."""
    heads: Cut | None = None
    """With ``by_head``: of one rank."""


@dataclass(frozen=True, slots=True)
class Linear:
    """``x [num_tokens, in] ->`` the values of ``spec.outputs``: ``x @ weight.T (+ bias)``. ``tied``: the weight is that
    of the embedding."""

    spec: LinearSpec
    tied: bool = False


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """Rotary position embedding of a checkpoint (RoFormer, arXiv 2104.09864).

    ``kind`` is ``default``, ``linear``, ``dynamic``, ``yarn``, ``llama3``, ``longrope`` or ``proportional``; ``params``
    holds that kind's own numbers under their ``rope_scaling``/``rope_parameters`` names.
    """

    theta: float = 10000.0
    kind: str = "default"
    rotary_dim: int | None = None
    """Rotated part of each head; ``None`` means all of ``head_dim``."""
    interleaved: bool = False
    """Neighbours ``(2i, 2i + 1)`` are rotated together, as in the paper, instead of ``(i, i + rotary_dim / 2)``."""
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions (arXiv 2104.09864) of each head of each input."""

    facts: RopeFacts
    head_dim: int
    start: int = 0
    """First dimension of a head that is rotated."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Features ``start .. stop``."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """Dimensions ``start .. stop`` of each head of ``head_dim``."""

    head_dim: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class HeadJoin:
    """``(a, b)``, ``num_heads`` heads each: head by head, those of ``a`` and then those of ``b``."""

    num_heads: int


@dataclass(frozen=True, slots=True)
class HeadLinear:
    """A projection of each head by itself: rows ``start .. stop`` of its ``rows`` rows of ``{name}.weight [num_heads *
    rows, features]``. ``x [num_heads * features] @ W.T``, or with ``transposed`` ``x [num_heads * (stop - start)] @
    W``."""

    name: str
    num_heads: int
    rows: int
    features: int
    start: int
    stop: int
    transposed: bool = False
    heads: Cut | None = None
    """Of one rank; ``num_heads`` is then how many it has."""


@dataclass(frozen=True, slots=True)
class KVWrite:
    """``(keys, values)`` go into the cache; ``(keys,)`` where values are the first part of them. No output."""

    num_kv_heads: int
    head_dim: int
    heads: Cut | None = None
    """Of one rank; ``num_kv_heads`` is then how many it has."""


@dataclass(frozen=True, slots=True)
class Attention:
    """``queries -> [num_tokens, num_heads * out_dim]``: causal attention over what is in the cache; ``window`` in
    tokens, ``scale`` multiplies q·k, ``soft_cap`` bounds it: ``cap * tanh(score / cap)``.

    A query at position ``p`` sees keys from :meth:`first_key` to ``p``."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    value_dim: int | None = None
    """Values are the first ``value_dim`` numbers of keys, and so is what comes out; ``None``: values of ``head_dim``
    are cached beside keys."""
    sinks: bool = False
    """Each head has one more logit, of no key, in its softmax: probabilities of keys then sum up to less than 1."""
    chunk: int | None = None
    """Queries see keys of their own chunk alone: chunks of so many tokens follow one another from the first token on.
    Not beside a ``window``."""

    @property
    def out_dim(self) -> int:
        """Of a head that comes out."""
        return self.head_dim if self.value_dim is None else self.value_dim

    def first_key(self, position: Any) -> Any:
        """The first key that a query at ``position`` sees; below 0 where its window begins before the sequence. Of a
        number, or of an integer tensor."""
        if self.chunk is not None:
            return position - position % self.chunk
        return 0 * position if self.window is None else position - self.window + 1


MOST_TAPS = 8
"""Of a convolution: no KV block is smaller, so the tokens that it reads lie in two."""


@dataclass(frozen=True, slots=True)
class ShortConv:
    """``(x, ...) ->`` as many: ``act`` of a causal convolution of every feature by itself over the last ``kernel``
    tokens, at most :data:`MOST_TAPS`; ``{name}.weight [features of all inputs, 1, kernel]``, the newest token last."""

    name: str
    features: int
    kernel: int
    act: Act


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """``(q, k, v, write, decay) -> [num_tokens, num_heads * value_dim]``: the gated delta rule (arXiv 2412.06464).

    ``q`` and ``k`` have ``num_key_heads`` heads of ``key_dim``, each for ``num_heads / num_key_heads`` heads of ``v``
    of ``value_dim``; ``write`` and ``decay`` are one number a head. A head's state ``S [key_dim, value_dim]`` begins as
    0. Of each token, with ``q`` and ``k`` divided by their lengths, ``b = sigmoid(write)`` and ``g = -exp({rate}) *
    softplus(decay + {bias})``: ``S = exp(g) * S``, ``S = S + k (b * (v - S.T k)).T``, and ``S.T q / sqrt(key_dim)``
    comes out. All in float32. ``rate`` and ``bias`` name tensors of the checkpoint, ``[num_heads]``.
    """

    num_key_heads: int
    key_dim: int
    num_heads: int
    value_dim: int
    rate: str
    bias: str


@dataclass(frozen=True, slots=True)
class Gated:
    """``(gate, up) -> act(gate) * (up + offset)`` (arXiv 2002.05202)."""

    act: Act
    limit: float | None = None
    """Before that, gates are cut to at most ``limit``, and ups to at most ``limit`` on both sides of 0."""
    alpha: float = 1.0
    """Of ``silu``: ``x * sigmoid(alpha * x)``."""
    offset: float = 0.0

    @property
    def is_plain(self) -> bool:
        """``act(gate) * up`` and nothing else."""
        return self == Gated(self.act)


@dataclass(frozen=True, slots=True)
class Activation:
    """``act(x)``"""

    act: Act


@dataclass(frozen=True, slots=True)
class Add:
    """``a + b``"""


@dataclass(frozen=True, slots=True)
class Gate:
    """``(x, gate) -> x * sigmoid(gate)``; one gate may serve all features."""


@dataclass(frozen=True, slots=True)
class PositionScale:
    """``x * (1 + beta * log(1 + floor((position + offset) / length)))``, each token by its position: queries that see
    more than ``length`` tokens."""

    beta: float
    length: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Scale:
    """``factor * x``"""

    factor: float
    rounded: bool = False
    """The factor is rounded to the dtype of ``x`` first."""


@dataclass(frozen=True, slots=True)
class ScaleBy:
    """``x * tensor``, one of the checkpoint named ``name``: ``[size]``, a number for each feature, or one for all."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class SoftCap:
    """``cap * tanh(x / cap)``"""

    cap: float


@dataclass(frozen=True, slots=True)
class Router:
    """``x -> logits [num_tokens, num_experts]`` float32: ``{name}.weight [num_experts, in_features]`` (and ``.bias``),
    multiplied in float32, never rounded and never cut: all ranks must choose alike."""

    name: str
    in_features: int
    num_experts: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """``logits -> (ids, weights)``, ``[num_tokens, top_k]`` each: the experts of every token, int64, and what their
    outputs are multiplied by, float32.

    ``scores``: ``softmax`` or ``sigmoid`` of all logits, or the ``logits`` themselves, of which those chosen go through
    a softmax. With ``correction`` (``[num_experts]`` in the checkpoint) experts are chosen by score plus correction,
    and weighted by score; with ``sigmoid`` alone by logits, of which large ones have equal scores. With ``groups`` only
    experts of the best ``chosen_groups`` are chosen; a group is as good as its best expert (``max``) or its two best
    together (``top2``).
    """

    num_experts: int
    top_k: int
    scores: Literal["softmax", "sigmoid", "logits"] = "softmax"
    renormalize: bool = False
    """Weights of a token are divided by their sum."""
    scale: float = 1.0
    """Then multiplied by this."""
    correction: str | None = None
    groups: int = 1
    chosen_groups: int = 1
    group_by: Literal["max", "top2"] = "max"
    expert_scale: str | None = None
    """A tensor ``[num_experts]``: weights are at last multiplied by the numbers of their experts."""


@dataclass(frozen=True, slots=True)
class Experts:
    """``(x, ids, weights) -> `` the sum over a token's experts of ``weight * down(gated(gate(x), up(x)))``.

    ``gate_up`` and ``down``: of one expert, with ``{}`` in the names of their parts for its number. A checkpoint may
    have all experts' in one tensor instead, :attr:`fused`.
    """

    num_experts: int
    top_k: int
    gate_up: LinearSpec
    down: LinearSpec
    gated: Gated
    fused: FusedExperts | None = None
    weighs_inputs: bool = False
    """Weights multiply what experts read, not what they make: the sum of ``expert(weight * x)``."""
    held: HeldExperts | None = None
    """The experts of one rank; ``num_experts`` is then how many it has, and an id says which of these, from 0 on."""


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """Names of tensors that hold all experts: ``gate_up [num_experts, 2 * size, in]``, gates first, and ``down
    [num_experts, out, size]``; biases have ``_bias`` behind the name. ``transposed``: the last two axes are the other
    way round; ``interleaved``: gates and ups take turns."""

    gate_up: str
    down: str
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class TorchFunction:
    """What no other op computes: ``function(*inputs, *tensors) -> [num_tokens, out_features]``, a plain function of
    torch.

    Inputs have the compute dtype, tensors are float32; what comes out is rounded to the compute dtype. Each token is
    computed by itself, into new memory, and nothing waits for the device. No kernel is ever fused with it.
    """

    function: str
    """``package.module:function``, imported where the model is loaded."""
    in_features: tuple[int, ...]
    """Of each input."""
    out_features: int
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Whole names and shapes of tensors of the checkpoint. Every rank has all of them."""
    by_feature: bool = False
    """Each feature of the output follows from the same feature of the inputs: ranks may compute some of them each."""


@dataclass(frozen=True, slots=True)
class AllReduce:
    """``x -> `` the sum of all ranks' ``x``, on every rank: of summands. Placed by the core alone, like all that ranks
    exchange."""


@dataclass(frozen=True, slots=True)
class GatherTokens:
    """``x -> `` that of the tokens of all ranks, in a step whose tokens they share out; ``x`` in any other."""


@dataclass(frozen=True, slots=True)
class SumTokens:
    """``x -> `` the sum of ``x`` over all ranks of a stage, of a rank's own tokens: ``x`` has those that
    :class:`GatherTokens` gathered."""


@dataclass(frozen=True, slots=True)
class AllGather:
    """``x -> [num_tokens, size]``: all ranks' features, on every rank."""

    size: int
    shares: tuple[Range, ...]
    """By rank, the features that it has: some may be on several ranks."""
    group: str = "tp"
    """Of ranks."""


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """``queries -> [num_tokens, own heads * out_dim]``: attention where each rank of the group ``dcp`` caches other
    tokens. Queries are those of all its ranks, and what comes out is that of a rank's own heads, of all keys."""

    attention: Attention
    """Of the queries of all ranks of the group, without sinks."""
    shares: tuple[Range, ...]
    """By rank of the group, the heads among these that are its own."""
    index: int
    """Which of them this rank is."""
    sinks: bool = False
    """As of :class:`Attention`: counted once, of all keys together."""


@dataclass(frozen=True, slots=True)
class OwnExperts:
    """``(ids, weights) ->`` the same for a rank with experts ``held`` alone: an id says which of these, from 0 on, and
    -1 stands for an expert of another rank."""

    held: HeldExperts


@dataclass(frozen=True, slots=True)
class CountExperts:
    """``ids -> ``: adds to a table of the layer how many pairs of a token and an expert went to each expert. Placed by
    the core alone, where experts are counted."""

    layer: int
    num_experts: int
    idle_row: int
    """Tokens of this row of the device tables are padding, and not counted."""


Op = (
    Embed
    | Norm
    | Linear
    | Rope
    | Slice
    | HeadSlice
    | HeadJoin
    | HeadLinear
    | KVWrite
    | Attention
    | ShortConv
    | DeltaRule
    | Gated
    | Activation
    | Add
    | Gate
    | PositionScale
    | Scale
    | ScaleBy
    | SoftCap
    | Router
    | Route
    | Experts
    | TorchFunction
    | AllReduce
    | GatherTokens
    | SumTokens
    | AllGather
    | SharedAttention
    | OwnExperts
    | CountExperts
)
