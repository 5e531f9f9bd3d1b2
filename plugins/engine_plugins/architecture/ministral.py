"""Ministral (8B), Ministral 3, and the text models of Mistral3 checkpoints (Mistral Small 3.1 and later, Ministral 3),
which see images beside.

Ministral is Mistral with a window in some layers; Ministral 3 is Mistral with queries that grow with their position, so
that attention stays sharp in long texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.checkpoint.sizes import DecoderSizes, read_sizes, windows_by_layer
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder, Value
from engine.contracts.model import ModelConfig
from engine_plugins.architecture.blocks import activation, expect_whole_rotation, gated_mlp, o_proj, qkv_proj
from engine_plugins.architecture.llama import decoder
from engine_plugins.architecture.nested import text_model, text_part

MISTRAL: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32,
}  # fmt: skip
MINISTRAL3: dict[str, Any] = {
    "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
ROPE: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
"""What ``config.json`` may leave out."""


class MinistralArchitecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return text_part(config, tied=True)

    def describe(self, model: ModelConfig, b: Builder) -> None:
        values, kind, name, head = Values(model.raw), "ministral3", "model", "lm_head"
        if model.architecture == "MinistralForCausalLM":
            kind = "mistral"
        if model.architecture == "Mistral3ForConditionalGeneration":
            kind = values.text("model_type", "mistral")
            name, head = text_model(b)
        if kind == "mistral":
            decoder(b, Values({**MISTRAL, **values.values}), "MistralForCausalLM", name, head)
        elif kind == "ministral3":
            _ministral3(b, values, name, head)
        else:
            raise ValueError(f"model_type={kind} in text_config: expected mistral or ministral3")


def _ministral3(b: Builder, values: Values, name: str, head: str) -> None:
    values = Values({**MINISTRAL3, **values.values})
    if not values.has("rope_parameters") and not values.has("rope_scaling"):
        values = Values({**values.values, "rope_parameters": ROPE})
    sizes, act = read_sizes(values), activation(values.text("hidden_act", "silu"))
    expect_whole_rotation(sizes)
    windows = windows_by_layer(values, sizes.num_layers, every=True)
    b.positions(sizes.max_position)
    x = b.embed(f"{name}.embed_tokens", sizes.vocab_size, sizes.hidden_size)
    for i, window in enumerate(windows):
        at = f"{name}.layers.{i}"
        with b.layer(x):
            h = b.rms_norm(x, f"{at}.input_layernorm", sizes.eps)
            x = b.add(x, _attention(b, h, f"{at}.self_attn", sizes, window))
            h = b.rms_norm(x, f"{at}.post_attention_layernorm", sizes.eps)
            x = b.add(x, gated_mlp(b, h, f"{at}.mlp", sizes, act))
    b.lm_head(b.rms_norm(x, f"{name}.norm", sizes.eps), head, sizes.vocab_size, tied=sizes.tied)


def _attention(b: Builder, h: Value, name: str, sizes: DecoderSizes, window: int | None) -> Value:
    rope = Values(sizes.rope.params)
    beta = rope.number("llama_4_scaling_beta", "MAX_ROPE_NUMBER")
    length = rope.whole("original_max_position_embeddings", "MAX_POSITION")
    q, k, v = qkv_proj(b, h, name, sizes)
    q, k = b.rope(q, k, sizes.rope, sizes.head_dim)
    q = b.position_scale(q, beta, length)
    return o_proj(b, b.attention(q, k, v, sizes.head_dim, window=window), name, sizes)
