"""Pipeline stages: which layers each has, and which values are handed from one to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

from engine.contracts.graph import Block, Graph


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers ``first .. last``, the last one not included."""

    first: int
    last: int


def crossing(graph: Graph, layer: int) -> tuple[int, ...]:
    """Values that are made before a layer and read from it on: the residual stream first."""
    made = set(graph.inputs) | {number for node in graph.embed.nodes for number in node.outputs}
    made |= {number for block in graph.layers[:layer] for node in block.nodes for number in node.outputs}
    read = [number for block in (*graph.layers[layer:], graph.head) for node in block.nodes for number in node.inputs]
    residual = graph.layers[layer].residual
    assert residual is not None
    return tuple(dict.fromkeys((residual, *(number for number in read if number in made))))


def stages_of(graph: Graph, count: int, costs: Sequence[float] | None = None) -> tuple[Stage, ...]:
    """``count`` stages whose largest costs as little as can be, and of which, then, all cost as nearly the same as can
    be. ``costs``: of each layer and, last, of the head; ``None``: by weights that a token reads. Raises ``ValueError``
    where so many are not possible."""
    costs = layer_costs(graph) if costs is None else costs
    sums = [0.0, *accumulate([*costs[:-2], costs[-2] + costs[-1]])]
    borders = [0, *_borders(graph), len(graph.layers)]
    if (most := len(borders) - 1) < count:
        raise ValueError(
            f"parallelism.pp={count}: the model falls into at most {most} stages; use parallelism.pp={most} or less"
        )
    marks = [sums[border] for border in borders]
    largest, _ = _cheapest(marks, count, max)
    _, ends = _cheapest(marks, count, lambda before, cost: before + cost * cost, largest)
    return tuple(Stage(*edge) for edge in pairwise([0, *(borders[end] for end in ends)]))


def given_stages(graph: Graph, layers: Sequence[int]) -> tuple[Stage, ...]:
    """Stages of so many layers. Raises ``ValueError`` where they are not those of the model, or one would read a
    cache of the stage before."""
    asked, ends = f"parallelism.stage_layers={list(layers)}", [0, *accumulate(layers)]
    if ends[-1] != len(graph.layers):
        raise ValueError(f"{asked}: these are for {ends[-1]} in all, and the model has {len(graph.layers)} layers")
    if wrong := set(ends[1:-1]) - set(_borders(graph)):
        raise ValueError(f"{asked}: layer {min(wrong)} reads what a layer of the stage before caches")
    return tuple(Stage(*edge) for edge in pairwise(ends))


def _cheapest(
    marks: Sequence[float], count: int, total: Callable[[float, float], float], most: float = inf
) -> tuple[float, tuple[int, ...]]:
    """The smallest total of ``count`` stages that cost at most ``most`` each, and where these end. ``marks``: costs up
    to each place where a stage may end, the beginning first; ``total``: of stages so far and one more."""
    nothing: tuple[float, tuple[int, ...]] = inf, ()
    best = [(0.0, ()), *[nothing] * (len(marks) - 1)]
    for _ in range(count):
        best = [
            min(
                (
                    (total(best[j][0], marks[i] - marks[j]), (*best[j][1], i))
                    for j in range(i)
                    if best[j][0] < inf and marks[i] - marks[j] <= most
                ),
                default=nothing,
            )
            for i in range(len(marks))
        ]
    return best[-1]


def layer_costs(graph: Graph) -> list[float]:
    """Weights that a token reads, of each layer and of the head."""
    return [float(sum(node.op.weights_of_a_token for node in block.nodes)) for block in (*graph.layers, graph.head)]


def _borders(graph: Graph) -> list[int]:
    """Layers before which a stage may begin: none that reads a cache of the stage before."""
    used = [_caches(layer) for layer in graph.layers]
    return [i for i in range(1, len(used)) if not set().union(*used[:i]) & set().union(*used[i:])]


def _caches(layer: Block) -> set[int]:
    return {node.cache for node in layer.nodes if node.cache is not None}
