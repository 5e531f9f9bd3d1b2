"""How often each expert is chosen: where that is counted, and which experts go together so that loads are equal.

Pure functions: no process, no tensor, no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.contracts.graph import Block, Graph, Node
from engine.contracts.ops import CountExperts, Experts, Route

ExpertLoad = Mapping[int, Sequence[int]]
"""By layer with experts, how many pairs of a token and an expert went to each of its experts."""
Spread = tuple[tuple[int, ...], ...]
"""By share, the numbers of its experts, ascending."""

SETTING = "parallelism.expert_load"


def in_order(num_experts: int, shares: int) -> Spread:
    """Experts that follow one another go together; the first shares have one more where they cannot be equal."""
    sizes = _sizes(num_experts, shares)
    starts = [sum(sizes[:share]) for share in range(shares)]
    return tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))


def by_load(loads: Sequence[int], shares: int) -> Spread:
    """Each expert, from the busiest on, goes to the share with the least load that has room. Shares are as large as
    those of :func:`in_order`; of equals the first comes first."""
    room, load = _sizes(len(loads), shares), [0] * shares
    found: list[list[int]] = [[] for _ in range(shares)]
    for expert in sorted(range(len(loads)), key=lambda expert: (-loads[expert], expert)):
        share = min((share for share in range(shares) if room[share]), key=lambda share: (load[share], share))
        found[share].append(expert)
        room[share] -= 1
        load[share] += loads[expert]
    return tuple(tuple(sorted(experts)) for experts in found)


def _sizes(num_experts: int, shares: int) -> list[int]:
    each, rest = divmod(num_experts, shares)
    return [each + (share < rest) for share in range(shares)]


def imbalance(load: ExpertLoad, shares: int) -> tuple[float, float]:
    """What the busiest share of each layer gets, summed over layers, over what a share gets on average: with experts
    in order, and by load. 1: all shares get as much."""
    mean = sum(map(sum, load.values())) / shares
    in_orders = sum(_busiest(loads, in_order(len(loads), shares)) for loads in load.values())
    by_loads = sum(_busiest(loads, by_load(loads, shares)) for loads in load.values())
    return in_orders / mean, by_loads / mean


def _busiest(loads: Sequence[int], spread: Spread) -> int:
    return max(sum(loads[expert] for expert in experts) for experts in spread)


def busiest_expert(loads: Sequence[int]) -> float:
    """How often the busiest expert is chosen, over the mean; 0 where none was."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 0.0


def layers_with_experts(graph: Graph) -> dict[int, int]:
    """How many experts they have, by number."""
    ops = ((i, node.op) for i, layer in enumerate(graph.layers) for node in layer.nodes)
    return {i: op.num_experts for i, op in ops if isinstance(op, Experts)}


def check_load(graph: Graph, load: ExpertLoad) -> None:
    """Raises ``ValueError`` for a load that was not measured with this model."""
    own, found = layers_with_experts(graph), {layer: len(loads) for layer, loads in load.items()}
    advice = f"measure it with this model and parallelism.count_experts=true, or leave {SETTING} out"
    if set(own) != set(found):
        layers = f"layers {_listed(found)}, and the model has experts in layers {_listed(own)}"
        raise ValueError(f"{SETTING}: has {layers}; {advice}")
    for layer, count in found.items():
        if count != own[layer]:
            raise ValueError(f"{SETTING}: layer {layer} has {count} counts, and the model has {own[layer]} experts "
                             f"there; {advice}")  # fmt: skip


def _listed(layers: Mapping[int, int]) -> str:
    """``0-3, 7``, or ``none``."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"


def counted(graph: Graph, idle_row: int) -> Graph:
    """The graph of a rank that has all layers, counting what its routers choose. ``idle_row``: of the device tables,
    which padding tokens belong to. Raises ``ValueError`` for a model without experts."""
    if not layers_with_experts(graph):
        raise ValueError("parallelism.count_experts=true: the model has no experts; leave it out")
    layers = tuple(_counted(layer, i, idle_row) for i, layer in enumerate(graph.layers))
    return replace(graph, layers=layers)


def _counted(block: Block, layer: int, idle_row: int) -> Block:
    nodes: list[Node] = []
    for node in block.nodes:
        nodes.append(node)
        if isinstance(node.op, Route):
            nodes.append(Node(CountExperts(layer, node.op.num_experts, idle_row), node.outputs[:1], ()))
    return replace(block, nodes=tuple(nodes))
