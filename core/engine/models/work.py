"""What a rank does in a step, in bytes and operations, from its graph alone: what it reads, multiplies, and exchanges.

Pure arithmetic: how long that takes on a device is :mod:`engine_lab.shared.estimates`.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.graph import Graph
from engine.contracts.ops.work import Exchange, OpStep, OpWork, Step, Widths
from engine.models.manifest import head_projections
from engine.models.placement import RankGraph


@dataclass(frozen=True, slots=True)
class RankWork:
    """Of one rank in one step."""

    ops: tuple[OpWork, ...]
    exchanges: tuple[Exchange, ...]
    handed_on: tuple[int, ...]
    """Bytes of each value that goes to the next stage."""
    num_layers: int
    num_mixtures: int
    """Mixtures of experts."""

    @property
    def num_bytes(self) -> float:
        return sum(op.num_bytes for op in self.ops)

    @property
    def flops(self) -> float:
        return sum(op.flops for op in self.ops)


def work_of(rank: RankGraph, step: Step, widths: Widths, ep: int = 1) -> RankWork:
    """What ``rank`` does in ``step``. Of ranks with whole experts (``ep`` shares of them) it counts as the one whose
    experts are chosen most often: the others wait for it."""
    graph, item = rank.graph, widths.values / 8
    ops: list[OpWork] = []
    exchanges: list[Exchange] = []
    # The last stage may hold an embedding that its head shares: the tokens are embedded in the first one.
    for block in (*(() if graph.received else (graph.embed,)), *graph.layers, graph.head):
        # After the layers only the last token of each request is computed.
        num_tokens = step.requests if block is graph.head else step.num_tokens
        for node in block.nodes:
            cache = None if node.cache is None else graph.caches[node.cache]
            at = OpStep(step, num_tokens, widths, graph.sizes, cache, ep)
            if (exchange := node.op.exchange(node, at)) is not None:
                exchanges.append(exchange)
            if (work := node.op.work(node, at)) is not None:
                ops.append(work)
    handed_on = tuple(int(step.num_tokens * graph.sizes[value] * item) for value in graph.handed_on)
    num_mixtures = sum(op.kind == "experts" for op in ops)
    return RankWork(tuple(ops), tuple(exchanges), handed_on, len(graph.layers), num_mixtures)


def held_bytes(graph: Graph, widths: Widths) -> int:
    """Weights of one rank. ``graph``: its own."""
    of_heads = sum(spec.num_weights for spec in head_projections(graph)) * widths.values / 8
    return int(sum(node.op.held_bytes(node, widths) for node in graph.nodes) + of_heads)
