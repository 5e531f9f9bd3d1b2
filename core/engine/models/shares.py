"""How ranks share out the values of a graph: which of them, and where they are cut.

A linear layer with ``shard="out"`` makes values of which each rank has some features; what is computed of them feature
by feature, or head by head, is shared out alike, up to a layer with ``shard="in"``, whose products are summands. Values
that are shared out alike have one :class:`Shared`. Where such a value may be cut, its readers say together: between
heads, and between the groups of features that share a scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from itertools import pairwise
from typing import Protocol

from engine.contracts.graph import Graph, Node
from engine.contracts.ops import Embed, Experts, Linear, LinearSpec
from engine.models.fused_experts import fused_layers
from engine.models.sharding import Axis

Bounds = tuple[tuple[Fraction, Fraction], ...]
"""By rank, where its share begins and ends, as fractions of the whole."""


class Units(Protocol):
    """How a quantizer's layers may be cut: :func:`engine.models.sharding.smallest_cut`."""

    def __call__(self, spec: LinearSpec, axis: Axis) -> int | None: ...


@dataclass(slots=True, eq=False)
class Shared:
    """How some values are shared out."""

    name: str
    """Whose: for messages."""
    step: Fraction
    """Cuts lie at multiples of it."""
    joined: Shared | None = None
    """What it turned out to be the same as."""
    heads_of: Shared | None = None
    """Of queries: how the keys that they read are shared out."""
    kv_heads: int = 0
    """Of keys and values."""
    bounds: Bounds = ()

    @property
    def found(self) -> Shared:
        return self if self.joined is None else self.joined.found

    def may_cut(self, step: Fraction) -> None:
        """Only at multiples of ``step``, too."""
        mine = self.found
        mine.step = common_step(mine.step, step)

    def same(self, other: Shared) -> None:
        """Both are one."""
        mine, theirs = self.found, other.found
        if mine is theirs:
            return
        theirs.joined = mine
        mine.step = common_step(mine.step, theirs.step)
        mine.heads_of = mine.heads_of or theirs.heads_of
        mine.kv_heads = mine.kv_heads or theirs.kv_heads


def common_step(a: Fraction, b: Fraction) -> Fraction:
    """The smallest multiple of both."""
    return Fraction(math.lcm(a.numerator * b.denominator, b.numerator * a.denominator), a.denominator * b.denominator)


@dataclass(slots=True)
class Shares:
    """What was found of a graph."""

    of_value: dict[int, Shared] = field(default_factory=dict)
    """Values that are shared out; all others are whole on every rank."""
    of_op: dict[int, Shared] = field(default_factory=dict)
    """By node, in the order of the graph: how its weights are cut, of embeddings, experts, and linear layers whose
    inputs are cut or whose outputs are gathered again."""
    reads: dict[int, tuple[Shared | None, ...]] = field(default_factory=dict)
    """By node, how it reads each input: shared out, or whole."""

    def __getitem__(self, value: int) -> Shared | None:
        found = self.of_value.get(value)
        return None if found is None else found.found


def shares_of(graph: Graph, units: Units, tp: int, ep: int = 1) -> Shares:
    """How ``tp`` ranks share out ``graph``. Raises ``ValueError`` naming what cannot be shared out so."""
    found = _Finder(graph, units).run(ep < tp)
    distinct = {id(shared.found): shared.found for shared in (*found.of_value.values(), *found.of_op.values())}
    experts = {id(found.of_op[i].found) for i, node in enumerate(graph.nodes) if isinstance(node.op, Experts)}
    for shared in distinct.values():
        if id(shared) in experts:
            shared.bounds = divided(shared, tp // ep) * ep
        elif shared.kv_heads:
            queries = [one for one in distinct.values() if one.heads_of is not None and one.heads_of.found is shared]
            _divide_heads(shared, queries, tp)
        elif shared.heads_of is None:
            shared.bounds = divided(shared, tp)
    return found


def whole_shares(graph: Graph) -> Shares:
    """Of one rank alone, which may have some experts and all of everything else."""
    found = Shares()
    for i, node in enumerate(graph.nodes):
        found.reads[i] = (None,) * len(node.inputs)
        if isinstance(node.op, Experts):
            name = node.op.down.parts[0].name
            found.of_op[i] = Shared(name, Fraction(1), bounds=((Fraction(0), Fraction(1)),))
    return found


def divided(shared: Shared, ranks: int) -> Bounds:
    """Shares that are as equal as steps allow, larger ones first. Raises ``ValueError`` for more ranks than steps."""
    return cut_evenly(shared, Fraction(0), Fraction(1), ranks)


def cut_evenly(shared: Shared, begin: Fraction, end: Fraction, ranks: int) -> Bounds:
    steps = math.ceil((end - begin) / shared.step)
    if steps < ranks:
        raise ValueError(f"{shared.name} has {steps} {'part' if steps == 1 else 'parts'} that cannot be cut further")
    ends = [begin]
    for rank in range(ranks):
        ends.append(min(end, ends[-1] + shared.step * (steps // ranks + (rank < steps % ranks))))
    return tuple(pairwise(ends))


def _divide_heads(keys: Shared, queries: Sequence[Shared], tp: int) -> None:
    """Heads of keys are shared out, and with each the queries that read it; where there are fewer than ranks, several
    ranks have the same one, and share out its queries."""
    together = reduce(common_step, (one.step for one in queries), keys.step)
    if math.ceil(1 / together) >= tp:
        bounds = divided(Shared(keys.name, together), tp)
        for one in (keys, *queries):
            one.bounds = bounds
        return
    head = Fraction(1, keys.kv_heads)
    if keys.step != head or keys.kv_heads > tp:
        raise ValueError(f"{keys.name} has {math.ceil(1 / together)} parts that cannot be cut further")
    counts = [tp // keys.kv_heads + (i < tp % keys.kv_heads) for i in range(keys.kv_heads)]
    keys.bounds = tuple((i * head, (i + 1) * head) for i, count in enumerate(counts) for _ in range(count))
    for one in queries:
        if (head / one.step).denominator != 1:
            raise ValueError(f"{one.name}: queries of different key heads share a scale")
        of_a_head = Shared(f"{one.name}, of one key head,", one.step)
        one.bounds = tuple(
            share for i, count in enumerate(counts) for share in cut_evenly(of_a_head, i * head, (i + 1) * head, count)
        )


class _Finder:
    def __init__(self, graph: Graph, units: Units) -> None:
        self._graph = graph
        self._units = units
        self._shares = Shares()
        self._caches: dict[int, Shared] = {}

    def run(self, cuts_experts: bool) -> Shares:
        head = self._graph.lm_head
        vocabulary: Shared | None = None
        for i, node in enumerate(self._graph.nodes):
            op = node.op
            if isinstance(op, Embed):
                self._shares.of_op[i] = Shared(op.name, Fraction(1, op.vocab_size))
                if head.tied and vocabulary is None:
                    vocabulary = self._shares.of_op[i]
                self._read_whole(i, node)
            elif isinstance(op, Linear):
                self._linear(i, node, op)
                if op.tied and vocabulary is not None:
                    vocabulary.same(self._shares.of_value[node.outputs[0]])
            elif isinstance(op, Experts):
                self._experts(i, node, op, cuts_experts)
            else:
                self._alike(i, node)
        return self._shares

    def _linear(self, i: int, node: Node, op: Linear) -> None:
        spec, (read,) = op.spec, node.inputs
        name, size = spec.parts[0].name, self._graph.sizes[read]
        out = None if spec.shard == "none" else self._units(spec, "out")
        if spec.shard == "out" and out is not None:
            self._read_whole(i, node)
            for value in node.outputs:
                self._make(value, Shared(name, Fraction(out, self._graph.sizes[value])))
            return
        unit = self._units(spec, "in") if spec.shard == "in" else None
        if unit is not None:
            shared = self._shares[read] or Shared(name, Fraction(1, size))
            shared.may_cut(Fraction(unit, size))
            self._shares.of_op[i], self._shares.reads[i] = shared, (shared,)
            return
        self._read_whole(i, node)
        if spec.shard == "in" and out is not None:  # its outputs are shared out instead, and gathered
            self._shares.of_op[i] = Shared(name, Fraction(out, spec.out_features))

    def _experts(self, i: int, node: Node, op: Experts, cuts: bool) -> None:
        self._read_whole(i, node)
        features = op.down.in_features
        shared = Shared(op.down.parts[0].name, Fraction(1, features))
        # Whether a checkpoint has them one by one or together shows when it is read.
        forms = [(op.gate_up, op.down), *(() if op.fused is None else (fused_layers(op),))]
        for gate_up, down in forms:
            out, inside = self._units(gate_up, "out"), self._units(down, "in")
            if cuts and (out is None or inside is None):
                said = "experts that are stored so cannot be cut; parallelism.ep spreads them"
                raise ValueError(f"{shared.name}: {said}")
            for unit in (out, inside):
                shared.may_cut(Fraction(unit or 1, features))
        self._shares.of_op[i] = shared

    def _alike(self, i: int, node: Node) -> None:
        """Inputs and outputs are shared out alike, or whole; or each output as the input that it is computed of."""
        op, sizes = node.op, self._graph.sizes
        shared = [found for value in node.inputs if (found := self._shares[value]) is not None]
        parts = op.parts(sizes[node.inputs[0]])
        keys = self._caches.get(node.cache) if node.cache is not None else None
        if keys is None and op.kv_heads_read > 1:
            parts = None  # all keys are here, and so must be all queries
        if keys is not None and op.kv_heads_read and not shared and parts is not None:
            shared = [Shared(keys.name, Fraction(1, parts))]  # of whole queries each rank takes its own
        if not shared or parts is None:
            self._read_whole(i, node)
            return
        if op.each_alone:
            self._each_alone(i, node)
            return
        mine = shared[0].found
        for other in shared[1:]:
            mine.same(other)
        mine.may_cut(Fraction(1, parts))
        for spec in op.projections:
            unit = self._units(spec, "out")
            if unit is None:
                raise ValueError(f"{spec.parts[0].name}: projections of heads that are stored so cannot be cut")
            mine.may_cut(Fraction(unit, spec.out_features))
        if keys is not None and op.kv_heads_read:
            mine.heads_of, keys.found.kv_heads = keys, op.kv_heads_read
        if op.writes_keys and node.cache is not None:
            self._caches[node.cache] = mine
        # An input of one feature, such as a gate of all features, is a number that every rank has.
        self._shares.reads[i] = tuple(None if sizes[value] == 1 and parts > 1 else mine for value in node.inputs)
        for value in node.outputs:
            self._make(value, mine)

    def _each_alone(self, i: int, node: Node) -> None:
        self._shares.reads[i] = tuple(self._shares[value] for value in node.inputs)
        for value, made, shared in zip(node.inputs, node.outputs, self._shares.reads[i], strict=True):
            parts = node.op.parts(self._graph.sizes[value])
            if shared is not None and parts is not None:
                shared.may_cut(Fraction(1, parts))
                self._make(made, shared)

    def _make(self, value: int, shared: Shared) -> None:
        self._shares.of_value[value] = shared

    def _read_whole(self, i: int, node: Node) -> None:
        self._shares.reads[i] = (None,) * len(node.inputs)
