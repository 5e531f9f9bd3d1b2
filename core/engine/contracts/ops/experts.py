"""Mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from engine.contracts.ops.base import Node, Op, TensorShape
from engine.contracts.ops.elementwise import Gated
from engine.contracts.ops.linear_spec import LinearSpec
from engine.contracts.ops.touched import busiest_share, touched_experts
from engine.contracts.ops.values import Cut, Range
from engine.contracts.ops.work import FLOAT32, OpStep, OpWork, Widths


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
class Router(Op):
    """``x -> logits [num_tokens, num_experts]`` float32: ``{name}.weight [num_experts, in_features]`` (and ``.bias``),
    multiplied in float32, never rounded and never cut: all ranks must choose alike."""

    name: str
    in_features: int
    num_experts: int
    bias: bool = False

    @property
    def tensors(self) -> Iterable[TensorShape]:
        yield f"{self.name}.weight", (self.num_experts, self.in_features)
        if self.bias:
            yield f"{self.name}.bias", (self.num_experts,)

    def work(self, node: Node, at: OpStep) -> OpWork:
        size = self.in_features * self.num_experts
        return OpWork("linear", FLOAT32 * size, 2.0 * at.num_tokens * size)


@dataclass(frozen=True, slots=True)
class Route(Op):
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

    @property
    def tensors(self) -> Iterable[TensorShape]:
        return ((name, (self.num_experts,)) for name in (self.correction, self.expert_scale) if name)


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """Names of tensors that hold all experts: ``gate_up [num_experts, 2 * size, in]``, gates first, and ``down
    [num_experts, out, size]``; biases have ``_bias`` after the name. ``transposed``: the last two axes are the other
    way round; ``interleaved``: gates and ups alternate."""

    gate_up: str
    down: str
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class Experts(Op):
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

    @property
    def each(self) -> list[tuple[LinearSpec, LinearSpec]]:
        """Gate and up, and down, of each expert that is here."""
        numbers = range(self.num_experts) if self.held is None else self.held.numbers
        return [(_numbered(self.gate_up, i), _numbered(self.down, i)) for i in numbers]

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        return tuple(spec for pair in self.each for spec in pair)

    @property
    def weights_of_a_token(self) -> int:
        return self.top_k * self._weights

    @property
    def _weights(self) -> int:
        """Of one expert."""
        return self.gate_up.num_weights + self.down.num_weights

    def some_features(self, mine: Cut) -> Experts:
        """A rank's share: these features inside of each expert."""
        gate_up, down = self.gate_up.some_outputs([mine, mine]), self.down.some_inputs(mine)
        return replace(self, gate_up=gate_up, down=down)

    def some_experts(self, held: HeldExperts) -> Experts:
        """A rank's share: these experts."""
        return replace(self, num_experts=len(held.numbers), held=held)

    def held_bytes(self, node: Node, widths: Widths) -> float:
        return self.num_experts * self._weights * widths.experts / 8

    def work(self, node: Node, at: OpStep) -> OpWork:
        """Of the rank whose experts are chosen most often: the others wait for it."""
        whole = self.num_experts if self.held is None else self.held.whole
        touched = touched_experts(whole, self.top_k, at.num_tokens)
        here = touched if self.held is None else busiest_share(whole, at.ep, touched)
        pairs = at.num_tokens * self.top_k * here / touched
        return OpWork("experts", here * self._weights * at.widths.experts / 8, 2.0 * pairs * self._weights)

    def beside(self, inputs: int) -> int:
        """What each expert makes, before it is added up."""
        return self.top_k * self.down.out_features


def _numbered(spec: LinearSpec, number: int) -> LinearSpec:
    parts = tuple(replace(part, name=part.name.replace("{}", str(number))) for part in spec.parts)
    share = spec.share and replace(spec.share, whole=_numbered(spec.share.whole, number))
    return replace(spec, parts=parts, share=share)


@dataclass(frozen=True, slots=True)
class OwnExperts(Op):
    """``(ids, weights) ->`` the same for a rank with experts ``held`` alone: an id says which of these, from 0 on, and
    -1 stands for an expert of another rank."""

    held: HeldExperts


@dataclass(frozen=True, slots=True)
class CountExperts(Op):
    """``ids -> ``: adds to a table of the layer how many pairs of a token and an expert went to each expert. Placed by
    the core alone, where experts are counted."""

    layer: int
    num_experts: int
    idle_row: int
    """Tokens of this row of the device tables are padding, and not counted."""
