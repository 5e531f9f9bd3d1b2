"""An architecture's description of a model: its graph, and what follows from that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from itertools import chain
from pathlib import Path

from engine.checkpoint.files import CheckpointError
from engine.checkpoint.headers import has_weights, read_headers
from engine.checkpoint.limits import MAX_TENSORS
from engine.contracts.architecture import Architecture
from engine.contracts.graph import Builder, Graph, Node
from engine.contracts.model import ModelConfig, ModelFacts
from engine.contracts.ops import Attention, Embed, Experts, Linear
from engine.models.rotations import why_no_longer
from engine.plugin_guard.calls import contract_error
from engine.plugin_guard.values import problems


def recorded(architecture: Architecture, model: ModelConfig) -> Graph:
    """The model's graph. Raises :class:`~engine.plugin_guard.calls.PluginError` where it is no whole model,
    :class:`~engine.checkpoint.files.CheckpointError` for damaged files if names of tensors are asked for, and what the
    plugin raises."""
    builder = Builder(cache(lambda: _stored(model.path)))
    architecture.describe(model, builder)
    graph = builder.graph()
    count = sum(node.op.num_experts for node in graph.nodes if isinstance(node.op, Experts))
    if count > MAX_TENSORS:
        raise CheckpointError(f"{count} experts in {len(graph.layers)} layers: expected at most {MAX_TENSORS} tensors")
    found = chain(problems(graph, Graph, "graph"), _not_whole(graph))
    if wrong := next(found, ""):
        raise contract_error(architecture, "describe", f"recorded a graph that is no whole model: {wrong}")
    return graph


def facts(architecture: Architecture, model: ModelConfig) -> ModelFacts:
    """What the engine knows of a model before it loads it. Raises as :func:`recorded`."""
    graph = recorded(architecture, model)
    return ModelFacts(
        **{field.name: getattr(model, field.name) for field in fields(ModelConfig)},
        hidden_size=graph.hidden_size,
        num_layers=len(graph.layers),
        vocab_size=graph.lm_head.spec.out_features,
        max_position=graph.max_position,
        tie_embeddings=graph.lm_head.tied,
        why_no_longer=why_no_longer(graph),
        attentions=tuple(dict.fromkeys(node.op for node in graph.nodes if isinstance(node.op, Attention))),
    )


def _stored(path: str) -> frozenset[str]:
    """Names of a checkpoint's tensors, those that are lost included: a model must not be described as one that never
    had them. None where there is no checkpoint yet."""
    if not has_weights(Path(path)):
        return frozenset()
    found = read_headers(path)
    return found.lost.union(found.tensors)


def _not_whole(graph: Graph) -> Iterator[str]:
    """What it lacks, or reads before anybody has computed it."""
    if graph.max_position < 1:
        yield "expected positions() of at least 1"
    if not any(isinstance(node.op, Embed) for node in graph.embed.nodes):
        yield "it has no embed()"
    if len(graph.inputs) != 1:
        yield f"{len(graph.inputs)} values are handed in, expected the tokens alone"
    if not graph.layers:
        yield "it has no layer()"
    heads = [where for where, block in _blocks(graph) for node in block if _is_head(node)]
    if heads != ["head"]:
        yield "expected one lm_head(), after the last layer"
    elif graph.embedding.vocab_size < graph.lm_head.spec.out_features:
        yield f"logits of {graph.lm_head.spec.out_features} tokens, embeddings of {graph.embedding.vocab_size}"
    if not any(isinstance(node.op, Attention) for node in graph.nodes):
        yield "it has no attention()"
    made = set(graph.inputs)
    for where, block in _blocks(graph):
        for node in block:
            if missing := [number for number in node.inputs if number not in made]:
                yield f"{where}: {type(node.op).__name__} reads values {missing} of another builder"
            made.update(node.outputs)
            if where in ("embed", "head") and node.op.needs_positions:
                yield f"{where}: {type(node.op).__name__} outside of a layer"
    for i, layer in enumerate(graph.layers):
        inside = {number for node in layer.nodes for number in node.outputs}
        if layer.residual in inside or not any(layer.residual in node.inputs for node in layer.nodes):
            yield f"layers[{i}]: expected layer(x) with the value x that it begins with"
    after = {number for node in graph.head.nodes for number in node.outputs}
    if len(read := {number for node in graph.head.nodes for number in node.inputs} - after) != 1:
        yield f"head: it reads {len(read)} values of what is before it, expected one"


def _blocks(graph: Graph) -> Iterator[tuple[str, tuple[Node, ...]]]:
    yield "embed", graph.embed.nodes
    yield from ((f"layers[{i}]", layer.nodes) for i, layer in enumerate(graph.layers))
    yield "head", graph.head.nodes


def _is_head(node: Node) -> bool:
    return isinstance(node.op, Linear) and node.op.spec.kind == "head"
