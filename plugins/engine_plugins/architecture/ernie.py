"""ERNIE 4.5: dense decoders that rotate neighbours, with biases everywhere or nowhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.checkpoint.sizes import read_sizes
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder
from engine.contracts.model import ModelConfig
from engine_plugins.architecture.blocks import activation, attention, expect_plain_layers, gated_mlp

DEFAULTS: dict[str, Any] = {
    "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 5e5,
}  # fmt: skip
"""What ``config.json`` may leave out."""


class ErnieArchitecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        values = Values({**DEFAULTS, **model.raw})
        sizes, act = read_sizes(values, tied=True), activation(values.text("hidden_act", "silu"))
        expect_plain_layers(values, sizes)
        rope, bias = replace(sizes.rope, interleaved=True), values.flag("use_bias", False)
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i in range(sizes.num_layers):
            name = f"model.layers.{i}"
            with b.layer(x):
                h = b.rms_norm(x, f"{name}.input_layernorm", sizes.eps)
                x = b.add(x, attention(b, h, f"{name}.self_attn", sizes, rope=rope, bias=bias, out_bias=bias))
                h = b.rms_norm(x, f"{name}.post_attention_layernorm", sizes.eps)
                x = b.add(x, gated_mlp(b, h, f"{name}.mlp", sizes, act, bias=bias))
        b.lm_head(b.rms_norm(x, "model.norm", sizes.eps), "lm_head", sizes.vocab_size, tied=sizes.tied)
