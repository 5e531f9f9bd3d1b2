"""Memory of activations: how many features of values are alive at once, from the graph alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine.contracts.graph import Graph, Node
from engine.contracts.ops import Linear, TorchFunction
from engine.models.fuse import Fused

FUNCTION_RESULTS = 4
"""What the operations of a torch function have made and not given back, at most, in outputs of the function: it is not
known, and functions are short."""


def made_in_a_layer(graph: Graph) -> int:
    """Features of all values that the largest layer makes."""
    return max(sum(graph.sizes[number] for node in layer.nodes for number in node.outputs) for layer in graph.layers)


def alive_in_a_layer(graph: Graph, layers: Iterable[Sequence[Fused[Any]]]) -> int:
    """Features of the values alive in the fullest moment of a layer, beside the residual stream that enters it.
    ``layers``: as calls of kernels."""
    pairs = zip(graph.layers, layers, strict=True)
    return max(_most_alive(graph, fused, layer.residual) for layer, fused in pairs)


def _beside(node: Node) -> int:
    """Features that an op needs for a token beside its inputs and outputs."""
    return FUNCTION_RESULTS * node.op.out_features if isinstance(node.op, TorchFunction) else 0


def _most_alive(graph: Graph, calls: Sequence[Fused[Any]], residual: int | None) -> int:
    alive: set[int] = set()
    most = 0
    for call in calls:
        # What a call hands on inside of itself is alive beside its inputs and outputs: products that a kernel for
        # gates does not store are none of it.
        gated = any(spec.kind == "gate_up" for spec in call.linears)
        products = () if gated else (node for node in call.nodes[:-1] if isinstance(node.op, Linear))
        inside = sum(graph.sizes[number] for node in products for number in node.outputs)
        inside += sum(map(_beside, call.nodes))
        alive |= {number for number in call.outputs if number != residual}
        most = max(most, sum(graph.sizes[number] for number in alive) + inside)
        alive -= call.last_use
    return most
