"""Memory, from the graph alone: how many features of values are alive at once, and which weights steps read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from engine.contracts.graph import Graph, Node
from engine.contracts.ops import Experts, Linear
from engine.contracts.step_cost import Mixture
from engine.models.fuse import Fused


def made_in_a_layer(graph: Graph) -> int:
    """Features of all values that the largest layer makes, of what its ops need beside them, and of what is
    before the layers beside the embedding."""
    before = sum(graph.sizes[number] for node in graph.embed.nodes[1:] for number in node.outputs)
    return before + max(
        sum(_beside(graph, node) + sum(graph.sizes[number] for number in node.outputs) for node in layer.nodes)
        for layer in graph.layers
    )


def alive_in_a_layer(graph: Graph, embed: Sequence[Fused[Any]], layers: Iterable[Sequence[Fused[Any]]]) -> int:
    """Features of the values alive in the fullest moment of a layer or before the layers, beside the residual stream
    that enters it. ``embed``, ``layers``: as calls of kernels."""
    pairs = zip(graph.layers, layers, strict=True)
    beside = sum(graph.sizes[number] for number in graph.entering[1:])
    in_layers = beside + max(_most_alive(graph, fused, layer.residual) for layer, fused in pairs)
    return max(in_layers, _most_alive(graph, embed, graph.entering[0]))


def _beside(graph: Graph, node: Node) -> int:
    """Features that an op needs for a token beside its inputs and outputs."""
    return node.op.beside(sum(graph.sizes[number] for number in node.inputs))


def mixtures(graph: Graph) -> tuple[Mixture, ...]:
    """The mixtures of a model, alike ones as one: what shares of the weights that a single token reads they are."""
    total = sum(node.op.weights_of_a_token for node in graph.nodes)
    read: Counter[tuple[int, int]] = Counter()
    for node in graph.nodes:
        if isinstance(op := node.op, Experts):
            read[op.num_experts, op.top_k] += op.weights_of_a_token
    return tuple(Mixture(*sizes, weights / total) for sizes, weights in read.items())


def _most_alive(graph: Graph, calls: Sequence[Fused[Any]], residual: int | None) -> int:
    alive: set[int] = set()
    most = 0
    for call in calls:
        # What a call hands on inside of itself is alive beside its inputs and outputs: products that a kernel for
        # gates does not store are none of it.
        gated = any(spec.kind == "gate_up" for spec in call.linears)
        products = () if gated else (node for node in call.nodes[:-1] if isinstance(node.op, Linear))
        inside = sum(graph.sizes[number] for node in products for number in node.outputs)
        inside += sum(_beside(graph, node) for node in call.nodes)
        alive |= {number for number in call.outputs if number != residual}
        most = max(most, sum(graph.sizes[number] for number in alive) + inside)
        alive -= call.last_use
    return most
