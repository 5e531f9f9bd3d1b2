"""Phi-3, Phi-3.5 and Phi-4 (arXiv 2404.14219): Llama with fused projections, rotations of a part of each head, and
longrope (arXiv 2402.13753)."""

from __future__ import annotations

from typing import Any

from engine.checkpoint.files import CheckpointError, clipped
from engine.checkpoint.sizes import DecoderSizes, read_sizes, windows_by_layer
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder, Value
from engine.contracts.model import ModelConfig
from engine.contracts.ops import Act, LinearPart
from engine_plugins.architecture.blocks import activation, expect, o_proj

TRAINED = "original_max_position_embeddings"
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 4096, TRAINED: 4096, "rms_norm_eps": 1e-5,
}  # fmt: skip
"""What ``config.json`` may leave out."""
ROPE_TYPES = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
"""As checkpoints of this family name them."""


class Phi3Architecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        values = _with_rope(Values({**DEFAULTS, **model.raw}))
        expect(values, {"layer_types": None})
        sizes, act = read_sizes(values), activation(values.text("hidden_act", "silu"))
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i, window in enumerate(windows_by_layer(values, sizes.num_layers, every=True)):
            name = f"model.layers.{i}"
            with b.layer(x):
                h = b.rms_norm(x, f"{name}.input_layernorm", sizes.eps)
                x = b.add(x, _attention(b, h, f"{name}.self_attn", sizes, window))
                h = b.rms_norm(x, f"{name}.post_attention_layernorm", sizes.eps)
                x = b.add(x, _mlp(b, h, f"{name}.mlp", sizes, act))
        b.lm_head(b.rms_norm(x, "model.norm", sizes.eps), "lm_head", sizes.vocab_size, tied=sizes.tied)


def _attention(b: Builder, h: Value, name: str, sizes: DecoderSizes, window: int | None) -> Value:
    queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    fused = LinearPart(f"{name}.qkv_proj", queries + 2 * keys, slices=(queries, keys, keys))
    q, k, v = b.split(h, fused, shard="out")
    q, k = b.rope(q, k, sizes.rope, sizes.head_dim)
    return o_proj(b, b.attention(q, k, v, sizes.head_dim, window=window), name, sizes)


def _mlp(b: Builder, h: Value, name: str, sizes: DecoderSizes, act: Act) -> Value:
    size = sizes.intermediate_size
    gate, up = b.split(h, LinearPart(f"{name}.gate_up_proj", 2 * size, slices=(size, size)), shard="out")
    return b.linear(b.gated(gate, up, act), LinearPart(f"{name}.down_proj", sizes.hidden_size), shard="in")


def _with_rope(values: Values) -> Values:
    """``values`` with the rotation as other families state it. The trained length stands beside it."""
    given = Values({**values.section("rope_scaling").values, **values.section("rope_parameters").values})
    kind = given.text("rope_type", given.text("type", "default"))
    if kind not in ROPE_TYPES:
        raise CheckpointError(f"rope type {clipped(kind)}: expected one of {', '.join(ROPE_TYPES)}")
    rope = {**given.values, "rope_type": ROPE_TYPES[kind], TRAINED: values.values[TRAINED]}
    return Values({**values.values, "rope_scaling": None, "rope_parameters": rope})
