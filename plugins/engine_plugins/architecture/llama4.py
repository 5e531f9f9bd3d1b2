"""Llama 4, also as the text model of checkpoints that see images.

Attention is chunked where layers rotate, neighbours together, and of every token where they do not; there queries grow
with their position (arXiv 2501.19399). Heads are normed after the rotation. Mixtures of experts whose inputs are
weighted lie beside a shared expert, in all layers or in some.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.checkpoint.files import CheckpointError, clipped
from engine.checkpoint.sizes import DecoderSizes, read_sizes
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder, Value
from engine.contracts.model import ModelConfig
from engine.contracts.ops import Act, FusedExperts, Gated, LinearPart, Route
from engine_plugins.architecture.blocks import (
    FULL,
    activation,
    expect_whole_rotation,
    gated_mlp,
    o_proj,
    qkv_proj,
    rotated_layers,
    top_k,
)
from engine_plugins.architecture.nested import text_model, text_part

CHUNKED = "chunked_attention"
DEFAULTS: dict[str, Any] = {
    "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "num_hidden_layers": 48,
    "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
    "rope_theta": 5e5, "no_rope_layer_interval": 4, "attention_chunk_size": 8192,
}  # fmt: skip
"""What ``config.json`` may leave out."""


class Llama4Architecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return text_part(config)

    def describe(self, model: ModelConfig, b: Builder) -> None:
        values = Values({**DEFAULTS, **model.raw})
        name, head = "model", "lm_head"
        if model.architecture == "Llama4ForConditionalGeneration":
            name, head = text_model(b)
        sizes, act = read_sizes(values, eps=1e-5), activation(values.text("hidden_act", "silu"))
        expect_whole_rotation(sizes)
        if values.values.get("no_rope_layers") == []:  # as if it were missing
            values = Values({**values.values, "no_rope_layers": None})
        rotated = rotated_layers(values, sizes.num_layers)
        chunks, sparse = _chunks(values, rotated), _sparse(values, sizes.num_layers)
        dense_size = values.whole("intermediate_size_mlp", "MAX_INTERMEDIATE_SIZE", 16384)
        b.positions(sizes.max_position)
        x = b.embed(f"{name}.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i, chunk in enumerate(chunks):
            at = f"{name}.layers.{i}"
            with b.layer(x):
                h = b.rms_norm(x, f"{at}.input_layernorm", sizes.eps)
                x = b.add(x, _attention(b, h, f"{at}.self_attn", values, sizes, rotated[i], chunk))
                h, mlp = b.rms_norm(x, f"{at}.post_attention_layernorm", sizes.eps), f"{at}.feed_forward"
                if i in sparse:
                    x = b.add(x, _experts(b, h, mlp, values, sizes, act))
                else:
                    x = b.add(x, gated_mlp(b, h, mlp, sizes, act, size=dense_size))
        b.lm_head(b.rms_norm(x, f"{name}.norm", sizes.eps), head, sizes.vocab_size, tied=sizes.tied)


def _chunks(values: Values, rotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    """The chunk of each layer. Without ``layer_types`` layers that rotate have one."""
    types = tuple(CHUNKED if each else FULL for each in rotated)
    if values.has("layer_types"):
        types = values.texts("layer_types", "MAX_LAYERS")
    if len(types) != len(rotated):
        raise CheckpointError(f"layer_types has {len(types)} entries for {len(rotated)} layers")
    if unknown := set(types) - {CHUNKED, FULL}:
        raise CheckpointError(f"layer_types {clipped(sorted(unknown))}: expected {CHUNKED} or {FULL}")
    chunk = values.whole("attention_chunk_size", "MAX_POSITION") if CHUNKED in types else None
    return tuple(chunk if kind == CHUNKED else None for kind in types)


def _sparse(values: Values, layers: int) -> tuple[int, ...]:
    """Layers with experts: ``moe_layers``, or every so many-th."""
    if values.has("moe_layers"):
        found = values.wholes("moe_layers", "MAX_LAYERS", largest="MAX_LAYERS")
        if beyond := [layer for layer in found if layer >= layers]:
            raise CheckpointError(f"moe_layers with {clipped(beyond)}: expected numbers below {layers}, as many layers")
        return found
    step = values.whole("interleave_moe_layer_step", "MAX_LAYERS", 1)
    return tuple(range(step - 1, layers, step))


def _attention(
    b: Builder, h: Value, name: str, values: Values, sizes: DecoderSizes, rotates: bool, chunk: int | None
) -> Value:
    bias = values.flag("attention_bias", False)
    q, k, v = qkv_proj(b, h, name, sizes, bias=bias)
    if rotates:
        q, k = b.rope(q, k, replace(sizes.rope, interleaved=True), sizes.head_dim)
        if values.flag("use_qk_norm", True):
            q, k = (b.rms_norm(each, None, sizes.eps, size=sizes.head_dim) for each in (q, k))
    elif values.flag("attn_temperature_tuning", True):
        beta = values.number("attn_scale", "MAX_ROPE_NUMBER", 0.1)
        q = b.position_scale(q, beta, values.whole("floor_scale", "MAX_POSITION", 8192), offset=1)
    return o_proj(b, b.attention(q, k, v, sizes.head_dim, chunk=chunk), name, sizes, bias=bias)


def _experts(b: Builder, h: Value, name: str, values: Values, sizes: DecoderSizes, act: Act) -> Value:
    count = values.whole("num_local_experts", "MAX_EXPERTS", 16)
    route = Route(count, top_k(values, count, 1), "sigmoid")
    gate, up = (LinearPart(f"{name}.experts.{{}}.{part}_proj", sizes.intermediate_size) for part in ("gate", "up"))
    made = b.experts(
        h, b.router(h, f"{name}.router", count), route, (gate, up),
        LinearPart(f"{name}.experts.{{}}.down_proj", sizes.hidden_size), Gated(act), weighs_inputs=True,
        fused=FusedExperts(f"{name}.experts.gate_up_proj", f"{name}.experts.down_proj", transposed=True),
    )  # fmt: skip
    return b.add(made, gated_mlp(b, h, f"{name}.shared_expert", sizes, act))
