"""Hunyuan: dense decoders that norm heads of queries and keys after the rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.checkpoint.sizes import DecoderSizes, read_sizes
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder, Value
from engine.contracts.model import ModelConfig
from engine_plugins.architecture.blocks import activation, expect_plain_layers, gated_mlp, o_proj, qkv_proj

DEFAULTS: dict[str, Any] = {
    "vocab_size": 290943, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
}  # fmt: skip
"""What ``config.json`` may leave out."""


class HunyuanArchitecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        values = Values({**DEFAULTS, **model.raw})
        sizes, act = _sizes(values), activation(values.text("hidden_act", "silu"))
        expect_plain_layers(values, sizes)
        bias = values.flag("attention_bias", False)
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i in range(sizes.num_layers):
            name = f"model.layers.{i}"
            with b.layer(x):
                h = b.rms_norm(x, f"{name}.input_layernorm", sizes.eps)
                x = b.add(x, _attention(b, h, f"{name}.self_attn", sizes, bias))
                h = b.rms_norm(x, f"{name}.post_attention_layernorm", sizes.eps)
                x = b.add(x, gated_mlp(b, h, f"{name}.mlp", sizes, act))
        b.lm_head(b.rms_norm(x, "model.norm", sizes.eps), "lm_head", sizes.vocab_size, tied=sizes.tied)


def _attention(b: Builder, h: Value, name: str, sizes: DecoderSizes, bias: bool) -> Value:
    dim = sizes.head_dim
    q, k, v = qkv_proj(b, h, name, sizes, bias=bias)
    q, k = b.rope(q, k, sizes.rope, dim)
    q = b.rms_norm(q, f"{name}.query_layernorm", sizes.eps, size=dim)
    k = b.rms_norm(k, f"{name}.key_layernorm", sizes.eps, size=dim)
    return o_proj(b, b.attention(q, k, v, dim), name, sizes, bias=bias)


def _sizes(values: Values) -> DecoderSizes:
    """A ``dynamic`` rotation with ``alpha`` is one of a larger base, whatever the length."""
    sizes = read_sizes(values)
    rope, given = sizes.rope, Values(sizes.rope.params)
    if rope.kind != "dynamic" or not given.values.get("alpha"):
        return sizes
    alpha = given.number("alpha", "MAX_ROPE_NUMBER")
    theta = rope.theta * alpha ** (sizes.head_dim / (sizes.head_dim - 2))
    stated = values.whole("max_position_embeddings", "MAX_POSITION")
    return replace(sizes, rope=replace(rope, theta=theta, kind="default", params={}), max_position=stated)
