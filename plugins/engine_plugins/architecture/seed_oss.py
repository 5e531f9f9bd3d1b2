"""Seed-OSS: Llama with biases of queries, keys and values."""

from __future__ import annotations

from typing import Any

from engine.checkpoint.sizes import read_sizes
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder
from engine.contracts.model import ModelConfig
from engine_plugins.architecture.blocks import activation, attention, expect_plain_layers, gated_mlp

DEFAULTS: dict[str, Any] = {
    "vocab_size": 155136, "hidden_size": 4096, "intermediate_size": 27648, "num_hidden_layers": 64,
    "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288,
}  # fmt: skip
"""What ``config.json`` may leave out."""


class SeedOssArchitecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        values = Values({**DEFAULTS, **model.raw})
        sizes, act = read_sizes(values), activation(values.text("hidden_act", "silu"))
        expect_plain_layers(values, sizes)
        bias, out_bias = values.flag("attention_bias", True), values.flag("attention_out_bias", False)
        mlp_bias = values.flag("mlp_bias", False)
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i in range(sizes.num_layers):
            name = f"model.layers.{i}"
            with b.layer(x):
                h = b.rms_norm(x, f"{name}.input_layernorm", sizes.eps)
                x = b.add(x, attention(
                    b, h, f"{name}.self_attn", sizes, rope=sizes.rope, bias=bias, out_bias=out_bias
                ))  # fmt: skip
                h = b.rms_norm(x, f"{name}.post_attention_layernorm", sizes.eps)
                x = b.add(x, gated_mlp(b, h, f"{name}.mlp", sizes, act, bias=mlp_bias))
        b.lm_head(b.rms_norm(x, "model.norm", sizes.eps), "lm_head", sizes.vocab_size, tied=sizes.tied)
