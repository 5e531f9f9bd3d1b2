"""GLM-4: dense decoders that rotate neighbours in half of each head, with one projection for gate and up. Those of
model type ``glm4`` (GLM-4-0414) also norm what attention and MLP make."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.checkpoint.sizes import read_sizes
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder
from engine.contracts.model import ModelConfig
from engine.contracts.ops import LinearPart
from engine_plugins.architecture.blocks import activation, attention, expect_full_attention

DEFAULTS: dict[str, Any] = {
    "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5,
}  # fmt: skip
"""What ``config.json`` may leave out."""


class GlmArchitecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        values, norms_after = Values({**DEFAULTS, **model.raw}), model.architecture == "Glm4ForCausalLM"
        sizes, act = read_sizes(values), activation(values.text("hidden_act", "silu"))
        expect_full_attention(values)
        rope, bias = replace(sizes.rope, interleaved=True), values.flag("attention_bias", True)
        inner = sizes.intermediate_size
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i in range(sizes.num_layers):
            name = f"model.layers.{i}"
            with b.layer(x):
                h = b.rms_norm(x, f"{name}.input_layernorm", sizes.eps)
                a = attention(b, h, f"{name}.self_attn", sizes, rope=rope, bias=bias)
                if norms_after:
                    a = b.rms_norm(a, f"{name}.post_self_attn_layernorm", sizes.eps)
                x = b.add(x, a)
                h = b.rms_norm(x, f"{name}.post_attention_layernorm", sizes.eps)
                fused = LinearPart(f"{name}.mlp.gate_up_proj", 2 * inner, slices=(inner, inner))
                gate, up = b.split(h, fused, shard="out")
                down = LinearPart(f"{name}.mlp.down_proj", sizes.hidden_size)
                m = b.linear(b.gated(gate, up, act), down, shard="in")
                if norms_after:
                    m = b.rms_norm(m, f"{name}.post_mlp_layernorm", sizes.eps)
                x = b.add(x, m)
        b.lm_head(b.rms_norm(x, "model.norm", sizes.eps), "lm_head", sizes.vocab_size, tied=sizes.tied)
