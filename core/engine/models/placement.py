"""Who holds what: the graph of each rank, in which ops are that rank's own and what ranks exchange are ops, too.

A pure function of the model's graph: no process, no tensor, no file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby

from engine.contracts.graph import EVERY_TOKEN, Block, Cached, Graph, KVSpec, Node, StateSpec, TokenShare
from engine.contracts.ops import (
    AllGather,
    AllReduce,
    Attention,
    Cut,
    Embed,
    Experts,
    GatherTokens,
    HeldExperts,
    Linear,
    OwnExperts,
    SharedAttention,
    Slice,
    SumTokens,
)
from engine.models.expert_load import ExpertLoad, by_load, check_load, in_order
from engine.models.layout import Layout
from engine.models.shares import Bounds, Shared, Shares, Units, shares_of, whole_shares
from engine.models.stages import Stage, crossing, given_stages, stages_of


@dataclass(frozen=True, slots=True)
class RankGraph:
    """What one rank computes."""

    graph: Graph
    stage: Stage
    caches: tuple[int, ...]
    """Which of the whole model's caches its own are, in order."""
    num_caches: int
    """Of the whole model."""

    @property
    def is_last(self) -> bool:
        """It makes logits."""
        return not self.graph.handed_on


def place(
    graph: Graph,
    layout: Layout,
    units: Units,
    *,
    drafts: bool = False,
    stage_layers: Sequence[int] | None = None,
    load: ExpertLoad | None = None,
) -> tuple[RankGraph, ...]:
    """The graph of each rank. ``drafts``: a drafter embeds tokens where the head is; ``stage_layers``: how many
    layers each stage has, ``None``: so that their weights are as equal as can be; ``load``: of the experts, by which
    shares of them are made equal, ``None``: they are spread in the order of their numbers. Raises ``ValueError`` for a
    model that cannot be shared out so, naming what cannot and which sizes could be, and for a load that is not the
    model's."""
    if layout.size == 1:
        return (_cut_stage(graph, Stage(0, len(graph.layers)), drafts),)
    if layout.pcp > 1 and any(isinstance(spec, StateSpec) for spec in graph.caches):
        raise ValueError(
            f"parallelism.pcp={layout.pcp}: recurrent layers compute tokens one after another; use parallelism.pcp=1"
        )
    stages = stages_of(graph, layout.pp) if stage_layers is None else given_stages(graph, stage_layers)
    shares = _shares(graph, layout, units)
    if load is not None:
        check_load(graph, load)
    found = []
    for rank in range(layout.size):
        mine = graph if shares is None else _OfRank(graph, shares, layout, rank, load).graph()
        found.append(_cut_stage(mine, stages[layout.stage(rank)], drafts))
    return tuple(found)


def _shares(graph: Graph, layout: Layout, units: Units) -> Shares | None:
    _check_experts(graph, layout.ep)
    if layout.tp == 1:
        return None if layout.ep == 1 else whole_shares(graph)
    try:
        found = shares_of(graph, units, layout.tp, min(layout.ep, layout.tp))
    except ValueError as error:
        fit = ", ".join(map(str, _fitting(graph, units)))
        raise ValueError(f"parallelism.tp={layout.tp}: {error}; parallelism.tp={fit} would fit") from error
    if layout.dcp > 1:
        _check_tokens(graph, found, layout)
    return found


MOST_RANKS = 16
"""That are tried, to tell which would fit."""


def _fitting(graph: Graph, units: Units) -> Iterator[int]:
    for tp in range(1, MOST_RANKS + 1):
        try:
            if tp > 1:
                shares_of(graph, units, tp)
        except ValueError:
            continue
        yield tp


def _check_experts(graph: Graph, ep: int) -> None:
    counts = {node.op.num_experts for node in graph.nodes if isinstance(node.op, Experts)}
    if ep > 1 and (not counts or min(counts) < ep):
        if not counts:
            raise ValueError(f"parallelism.ep={ep}: the model has no experts; use parallelism.ep=1")
        raise ValueError(
            f"parallelism.ep={ep}: the model has {min(counts)} experts; use parallelism.ep={min(counts)} or less"
        )


def _check_tokens(graph: Graph, shares: Shares, layout: Layout) -> None:
    """Ranks that share out tokens hold the same key-value heads, and each has some of the queries."""
    asked = f"parallelism.dcp={layout.dcp}"
    nodes = [(i, node) for i, node in enumerate(graph.nodes) if _shares_tokens(graph, node)]
    if not nodes:
        raise ValueError(f"{asked}: no layer of the model attends to every token; use parallelism.dcp=1")
    if any(isinstance(node.op, Attention) and (node.op.window or node.op.chunk) for _, node in nodes):
        raise ValueError(f"{asked}: layers with and without a window read the same keys; use parallelism.dcp=1")
    if any(shares.reads[i][0] is None for i, _ in nodes):
        raise ValueError(f"{asked}: the heads of the model cannot be shared out; use parallelism.dcp=1")
    held = {_keys_held(shares, i, layout.tp) for i, _ in nodes}
    fit = [size for size in range(1, layout.tp + 1) if layout.tp % size == 0 and all(_alike(h, size) for h in held)]
    if layout.dcp in fit:
        return
    heads = min(node.op.num_kv_heads for _, node in nodes if isinstance(node.op, Attention))
    raise ValueError(
        f"{asked}: ranks that cache different tokens hold the same key-value heads, and with parallelism.tp="
        f"{layout.tp} each of the model's {heads} key-value heads is on {_most_alike(held)}; parallelism.dcp="
        f"{', '.join(map(str, fit))} would fit"
    )


def _shares_tokens(graph: Graph, node: Node) -> bool:
    """Attention to every token: ranks may cache different ones. Windows and chunks hold few tokens anyway."""
    if not isinstance(node.op, Attention) or node.cache is None:
        return False
    return graph.caches[node.cache].reach == EVERY_TOKEN


def _keys_held(shares: Shares, i: int, tp: int) -> Bounds:
    """By rank, which of the keys that a node reads it holds."""
    (queries,) = (shared for shared in shares.reads[i] if shared is not None)
    keys = queries.found.heads_of
    return ((Fraction(0), Fraction(1)),) * tp if keys is None else keys.found.bounds


def _alike(held: Bounds, size: int) -> bool:
    return all(len(set(held[first : first + size])) == 1 for first in range(0, len(held), size))


def _most_alike(held: Collection[Bounds]) -> str:
    """On how many ranks a head is: ``1 rank``, or ``1 or 2 ranks``."""
    counts = sorted({len(list(group)) for bounds in held for _, group in groupby(bounds)})
    return f"{' or '.join(map(str, counts))} {'rank' if counts == [1] else 'ranks'}"


class _OfRank:
    """Writes down the graph of one rank of a stage, of all layers."""

    def __init__(self, graph: Graph, shares: Shares, layout: Layout, rank: int, load: ExpertLoad | None = None) -> None:
        self._load = load
        self._layer = -1
        """The one that is being written down; -1: the embedding."""
        self._graph = graph
        self._shares = shares
        self._layout = layout
        self._index = layout.index(rank)
        self._rank = rank
        self._sizes = list(graph.sizes)
        self._caches: list[Cached] = [self._tokens(spec) for spec in graph.caches]
        self._nodes: list[Node] = []
        self._converted: dict[tuple[int, int | None], int] = {}
        """Values in the other form than they were made: gathered (``None``), or cut as a share says (its id)."""
        for value, shared in shares.of_value.items():
            self._sizes[value] = self.own(shared, graph.sizes[value]).size

    def graph(self) -> Graph:
        blocks, numbers = (self._graph.embed, *self._graph.layers, self._graph.head), iter(range(1 << 30))
        placed = [self._block(block, numbers, layer) for layer, block in enumerate(blocks, start=-1)]
        last = placed[-1].nodes[-1].outputs[0]
        if (shared := self._shares[last]) is not None:
            self._nodes = list(placed[-1].nodes)
            self._gathered(last, shared)
            placed[-1] = replace(placed[-1], nodes=tuple(self._nodes))
        return replace(
            self._graph,
            embed=placed[0],
            layers=tuple(placed[1:-1]),
            head=placed[-1],
            sizes=tuple(self._sizes),
            caches=tuple(self._caches),
        )

    def _tokens(self, spec: Cached) -> Cached:
        """Where ranks share out tokens, which of them this one caches."""
        ranks = self._layout.dcp
        if ranks == 1 or not isinstance(spec, KVSpec) or spec.reach != EVERY_TOKEN:
            return spec
        return replace(spec, tokens=TokenShare(ranks, self._index % ranks))

    def _block(self, block: Block, numbers: Iterator[int], layer: int) -> Block:
        self._nodes, self._layer = [], layer
        for node, i in zip(block.nodes, numbers, strict=False):
            wanted = self._shares.reads[i]
            inputs = tuple(self._read(value, want) for value, want in zip(node.inputs, wanted, strict=True))
            self._place(i, replace(node, inputs=inputs))
        return replace(block, nodes=tuple(self._nodes))

    # Values ----------------------------------------------------------------------------------------------------------

    def own(self, shared: Shared, size: int) -> Cut:
        """This rank's features, or heads, of ``size``."""
        begin, end = shared.found.bounds[self._index]
        return Cut(_whole(begin * size), _whole(end * size), size)

    def _read(self, value: int, wanted: Shared | None) -> int:
        """The number under which a value is found as it is wanted."""
        made = self._shares[value]
        if (made is None) == (wanted is None):
            return value
        key = value, None if wanted is None else id(wanted.found)
        if key not in self._converted:
            self._converted[key] = self._gathered(value, made) if made is not None else self._cut(value, wanted)
        return self._converted[key]

    def _gathered(self, value: int, shared: Shared) -> int:
        size = self._graph.sizes[value]
        bounds = shared.found.bounds
        number = self._value(size)
        shares = tuple((_whole(begin * size), _whole(end * size)) for begin, end in bounds)
        self._nodes.append(Node(AllGather(size, shares), (value,), (number,)))
        return number

    def _cut(self, value: int, shared: Shared | None) -> int:
        assert shared is not None
        mine = self.own(shared, self._graph.sizes[value])
        number = self._value(mine.size)
        self._nodes.append(Node(Slice(mine.start, mine.stop), (value,), (number,)))
        return number

    def _value(self, size: int) -> int:
        self._sizes.append(size)
        return len(self._sizes) - 1

    # Ops -------------------------------------------------------------------------------------------------------------

    def _place(self, i: int, node: Node) -> None:
        op, of_op, wanted = node.op, self._shares.of_op.get(i), self._shares.reads[i]
        shared = next((each for each in wanted if each is not None), None)
        if isinstance(op, Embed) and of_op is not None:
            self._reduced(replace(node, op=replace(op, rows=self.own(of_op, op.vocab_size))))
        elif isinstance(op, Experts) and of_op is not None:
            self._experts(node, op, of_op)
        elif isinstance(op, Linear) and of_op is not None and shared is not None:
            mine = self.own(of_op, op.spec.in_features)
            self._reduced(replace(node, op=replace(op, spec=op.spec.some_inputs(mine))))
        elif isinstance(op, Linear) and of_op is not None:
            self._by_outputs(node, op, of_op)
        elif isinstance(op, Linear):
            made = [each for value in node.outputs if (each := self._shares[value]) is not None]
            own = [self.own(each, size) for each, size in zip(made, op.spec.outputs, strict=False)]
            self._nodes.append(replace(node, op=replace(op, spec=op.spec.some_outputs(own))) if own else node)
        elif isinstance(op, Attention) and shared is not None and self._spreads(node):
            self._shared_attention(node, op, shared)
        else:
            self._nodes.append(node if shared is None else self._of_parts(node, shared))

    def _of_all_tokens(self, value: int) -> int:
        number = self._value(self._sizes[value])
        self._nodes.append(Node(GatherTokens(), (value,), (number,)))
        return number

    def _reduced(self, node: Node, total: AllReduce | SumTokens | None = None) -> None:
        """An op whose output is a summand: what it was to make is the sum."""
        (made,) = node.outputs
        summand = self._value(self._sizes[made])
        self._nodes += [replace(node, outputs=(summand,)), Node(total or AllReduce(), (summand,), (made,))]

    def _by_outputs(self, node: Node, op: Linear, shared: Shared) -> None:
        """A layer that cannot be cut along its inputs makes a part of its outputs of all of them."""
        (made,) = node.outputs
        size, bounds = op.spec.out_features, shared.found.bounds
        mine = self.own(shared, size)
        part = self._value(mine.size)
        gather = AllGather(size, tuple((_whole(begin * size), _whole(end * size)) for begin, end in bounds))
        own = replace(op, spec=op.spec.some_outputs([mine]))
        self._nodes += [replace(node, op=own, outputs=(part,)), Node(gather, (part,), (made,))]

    def _experts(self, node: Node, op: Experts, shared: Shared) -> None:
        layout, (x, ids, weights) = self._layout, node.inputs
        mine, own = self.own(shared, op.down.in_features), op
        if mine.size < mine.whole:
            own = op.some_features(mine)
        if layout.ep > layout.tp:  # one share for each rank of the stage, whichever tokens it computes
            x, ids, weights = (self._of_all_tokens(value) for value in node.inputs)
        if layout.ep > 1:
            held = self._held(op.num_experts)
            ids_here, weights_here = self._value(self._sizes[ids]), self._value(self._sizes[weights])
            self._nodes.append(Node(OwnExperts(held), (ids, weights), (ids_here, weights_here)))
            node = replace(node, inputs=(x, ids_here, weights_here))
            own = own.some_experts(held)
        node = replace(node, op=own)
        if own is op:  # they can neither be cut nor spread: each rank has them all
            self._nodes.append(node)
        else:
            self._reduced(node, SumTokens() if layout.ep > layout.tp else None)

    def _held(self, num_experts: int) -> HeldExperts:
        """The experts of this rank's share."""
        layout, load = self._layout, self._load
        spread = in_order(num_experts, layout.ep) if load is None else by_load(load[self._layer], layout.ep)
        return HeldExperts(spread[layout.expert_share(self._rank)], num_experts)

    def _of_parts(self, node: Node, shared: Shared) -> Node:
        """An op that computes parts of its inputs by themselves: this rank's."""
        own = node.op.of_rank(node, _Mine(self, shared))
        if own.cache is not None:
            self._caches[own.cache] = own.op.cached(self._caches[own.cache])
        return own

    def _spreads(self, node: Node) -> bool:
        """Whether ranks share out the tokens that it attends to."""
        return self._layout.dcp > 1 and _shares_tokens(self._graph, node)

    def _shared_attention(self, node: Node, op: Attention, shared: Shared) -> None:
        """Queries of all ranks that share out tokens, to the keys that this one has."""
        size, ranks = self._layout.dcp, shared.found.bounds
        first, index = self._index // size * size, self._index % size
        heads = [(_whole(b * op.num_heads), _whole(e * op.num_heads)) for b, e in ranks[first : first + size]]
        begin, count = heads[0][0], heads[-1][1] - heads[0][0]
        shares = tuple((start - begin, stop - begin) for start, stop in heads)
        gathered = self._value(count * op.head_dim)
        features = tuple((start * op.head_dim, stop * op.head_dim) for start, stop in shares)
        (queries,) = node.inputs
        self._nodes.append(Node(AllGather(count * op.head_dim, features, "dcp"), (queries,), (gathered,)))
        kv_heads = _Mine(self, shared).keys(op.num_kv_heads)
        together = replace(op, num_heads=count, num_kv_heads=kv_heads, sinks=False)
        own = Cut(*heads[index], op.num_heads)
        spread = SharedAttention(together, shares, index, op.sinks)
        self._nodes.append(replace(node, op=spread, inputs=(gathered,), heads=own))


@dataclass(frozen=True, slots=True)
class _Mine:
    """What a rank has of values that are shared out alike: :class:`engine.contracts.ops.base.Mine`."""

    _rank: _OfRank
    _shared: Shared

    def __call__(self, size: int) -> Cut:
        return self._rank.own(self._shared, size)

    def keys(self, count: int) -> int:
        keys = self._shared.found.heads_of
        return count if keys is None else self._rank.own(keys, count).size


def _whole(number: Fraction) -> int:
    assert number.denominator == 1, number
    return number.numerator


def _cut_stage(graph: Graph, stage: Stage, drafts: bool) -> RankGraph:
    """The layers of one stage, with what is before or after them on the first or last one."""
    if stage.first == 0 and stage.last == len(graph.layers):
        return RankGraph(graph, stage, tuple(range(len(graph.caches))), len(graph.caches))
    is_first, is_last = stage.first == 0, stage.last == len(graph.layers)
    layers = graph.layers[stage.first : stage.last]
    used = sorted({node.cache for layer in layers for node in layer.nodes if node.cache is not None})
    own = {cache: number for number, cache in enumerate(used)}
    embeds = is_first or (is_last and (drafts or graph.lm_head.tied))
    found = replace(
        graph,
        embed=replace(graph.embed, residual=graph.layers[0].residual) if embeds else Block(()),
        layers=tuple(replace(layer, nodes=tuple(_renumbered(layer.nodes, own))) for layer in layers),
        head=graph.head if is_last else Block(()),
        caches=tuple(graph.caches[cache] for cache in used),
        handed_on=() if is_last else crossing(graph, stage.last),
        received=() if is_first else crossing(graph, stage.first),
    )
    return RankGraph(found, stage, tuple(used), len(graph.caches))


def _renumbered(nodes: Sequence[Node], own: Mapping[int, int]) -> Iterator[Node]:
    for node in nodes:
        yield node if node.cache is None else replace(node, cache=own[node.cache])
