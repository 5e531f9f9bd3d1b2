"""Granite 3: Llama with multipliers of the embedding, of scores and of what is added to the residual, and logits that
are divided."""

from __future__ import annotations

from typing import Any

from engine.checkpoint.sizes import read_sizes
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder
from engine.contracts.model import ModelConfig
from engine_plugins.architecture.blocks import activation, attention, expect_plain_layers, gated_mlp

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip
"""What ``config.json`` may leave out."""


class GraniteArchitecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        values = Values({**DEFAULTS, **model.raw})
        sizes, act = read_sizes(values), activation(values.text("hidden_act", "silu"))
        expect_plain_layers(values, sizes)
        bias, mlp_bias = values.flag("attention_bias", False), values.flag("mlp_bias", False)
        of_embedding, of_scores, of_added, logits_scaling = (
            values.number(key, "MAX_MULTIPLIER", 1.0)
            for key in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
        )
        b.positions(sizes.max_position)
        x = b.scale(b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size), of_embedding)
        for i in range(sizes.num_layers):
            name = f"model.layers.{i}"
            with b.layer(x):
                h = b.rms_norm(x, f"{name}.input_layernorm", sizes.eps)
                a = attention(
                    b, h, f"{name}.self_attn", sizes, rope=sizes.rope, bias=bias, out_bias=bias, scale=of_scores
                )
                x = b.add(x, b.scale(a, of_added))
                h = b.rms_norm(x, f"{name}.post_attention_layernorm", sizes.eps)
                x = b.add(x, b.scale(gated_mlp(b, h, f"{name}.mlp", sizes, act, bias=mlp_bias), of_added))
        h = b.rms_norm(x, "model.norm", sizes.eps)
        b.scale(b.lm_head(h, "lm_head", sizes.vocab_size, tied=sizes.tied), 1.0 / logits_scaling)
