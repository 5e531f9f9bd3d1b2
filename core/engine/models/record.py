"""An architecture's description of a model, as a graph."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from engine.border.calls import broken
from engine.border.values import problems
from engine.contracts.architecture import Architecture
from engine.contracts.graph import Builder, Graph, Node
from engine.contracts.model import ModelFacts
from engine.contracts.ops import Attention, Embed, KVWrite, Linear, Op, Rope


def recorded(architecture: Architecture, model: ModelFacts) -> Graph:
    """The model's graph. Raises :class:`~engine.border.calls.PluginError` where it is no whole model or does not fit
    the facts: kernels take sizes from both."""
    builder = Builder()
    architecture.describe(model, builder)
    graph = builder.graph()
    found = chain(problems(graph, Graph, "graph"), _wrong_order(graph), _misfits(graph, model))
    if wrong := next(found, ""):
        raise broken(architecture, "describe", f"recorded a graph that does not fit: {wrong}")
    return graph


def _wrong_order(graph: Graph) -> Iterator[str]:
    """What is no whole model, or is not where the core looks for it."""
    if not any(isinstance(node.op, Embed) for node in graph.embed.nodes):
        yield "it has no embed before the first layer"
    if len(graph.inputs) != 1:
        yield f"it has {len(graph.inputs)} inputs, expected the tokens alone"
    if sum(_is_head(node) for node in graph.nodes) != 1 or not any(_is_head(node) for node in graph.head.nodes):
        yield "expected one lm_head, behind the last layer"
    for where, block in (("embed", graph.embed), ("head", graph.head)):
        for node in block.nodes:
            if isinstance(node.op, Rope | KVWrite | Attention):
                yield f"{where}: {type(node.op).__name__} outside of the layers"
    for i, layer in enumerate(graph.layers):
        if not any(layer.residual in node.inputs for node in layer.nodes):
            yield f"layers[{i}] does not read its residual"
    made = {number for node in graph.head.nodes for number in node.outputs}
    read = {number for node in graph.head.nodes for number in node.inputs} - made
    if len(read) != 1:
        yield f"the head reads {len(read)} values of what is before it, expected one"


def _is_head(node: Node) -> bool:
    return isinstance(node.op, Linear) and node.op.spec.kind == "head"


def _misfits(graph: Graph, model: ModelFacts) -> Iterator[str]:
    if len(graph.layers) != model.num_layers:
        yield f"{len(graph.layers)} layers, expected {model.num_layers}"
    if len(graph.caches) != model.num_layers:
        yield f"{len(graph.caches)} attentions, expected one for each of {model.num_layers} layers"
    table, expected = (graph.embedding.vocab_size, graph.embedding.size), (model.vocab_size, model.hidden_size)
    if table != expected:
        yield f"embed {list(table)}, expected {list(expected)}"
    for index, layer in enumerate(graph.layers):
        for node in layer.nodes:
            for found in _head_misfits(node.op, model):
                yield f"layers[{index}]: {found}"
    if graph.sizes[graph.head.nodes[-1].outputs[0]] != model.vocab_size:
        yield f"logits of {graph.sizes[graph.head.nodes[-1].outputs[0]]} tokens, expected {model.vocab_size}"


def _head_misfits(op: Op, model: ModelFacts) -> Iterator[str]:
    if isinstance(op, KVWrite | Attention):
        shape, expected = (op.num_kv_heads, op.head_dim), (model.num_kv_heads, model.head_dim)
        if shape != expected:
            yield f"{type(op).__name__}: KV heads x head_dim {list(shape)}, expected {list(expected)}"
