"""Llama 2/3.x, Mistral, Qwen2/2.5 and Qwen3 (dense).

One shape serves them all: pre-norm attention with grouped KV heads and rotary positions, then a gated MLP. They
differ in biases, in a norm of query and key heads (Qwen3), and in which layers have a window.
"""

from __future__ import annotations

from typing import Any

from engine.checkpoint.sizes import read_sizes, windows_by_layer
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder
from engine.contracts.model import ModelConfig
from engine_plugins.architecture.blocks import activation, attention, expect_whole_rotation, gated_mlp, no_windows

DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
    },
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
    "Qwen3ForCausalLM": {
        "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768, "sliding_window": 4096,
    },
}  # fmt: skip
"""What ``config.json`` may leave out, where it is not what most families have."""


class LlamaArchitecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        decoder(b, Values(model.raw), model.architecture)


def decoder(b: Builder, values: Values, family: str, name: str = "model", head: str = "lm_head") -> None:
    """Record a model of the family. ``name``, ``head``: what names of its tensors and of the head's begin with."""
    values = Values({**DEFAULTS[family], **values.values})
    sizes, act = read_sizes(values), activation(values.text("hidden_act", "silu"))
    expect_whole_rotation(sizes)
    windows = _windows(values, family, sizes.num_layers)
    may_have_bias = family in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    bias = may_have_bias and values.flag("attention_bias", False)
    mlp_bias = family == "LlamaForCausalLM" and values.flag("mlp_bias", False)
    b.positions(sizes.max_position)
    x = b.embed(f"{name}.embed_tokens", sizes.vocab_size, sizes.hidden_size)
    for i, window in enumerate(windows):
        at = f"{name}.layers.{i}"
        with b.layer(x):
            h = b.rms_norm(x, f"{at}.input_layernorm", sizes.eps)
            x = b.add(x, attention(
                b, h, f"{at}.self_attn", sizes, rope=sizes.rope, window=window,
                bias=bias or family == "Qwen2ForCausalLM", out_bias=bias, head_norm=family == "Qwen3ForCausalLM",
            ))  # fmt: skip
            h = b.rms_norm(x, f"{at}.post_attention_layernorm", sizes.eps)
            x = b.add(x, gated_mlp(b, h, f"{at}.mlp", sizes, act, bias=mlp_bias))
    b.lm_head(b.rms_norm(x, f"{name}.norm", sizes.eps), head, sizes.vocab_size, tied=sizes.tied)


def _windows(values: Values, family: str, layers: int) -> tuple[int | None, ...]:
    """Llama has none, Mistral one in every layer."""
    if family == "MistralForCausalLM":
        return windows_by_layer(values, layers, every=True)
    return no_windows(values, layers) if family == "LlamaForCausalLM" else qwen_windows(values, layers)


def qwen_windows(values: Values, layers: int) -> tuple[int | None, ...]:
    """Where ``use_sliding_window`` says so: in the layers of ``layer_types``, or from ``max_window_layers`` on."""
    if not values.flag("use_sliding_window", False):
        return no_windows(values, layers)
    if values.has("layer_types"):
        return windows_by_layer(values, layers)
    first = values.whole("max_window_layers", "MAX_LAYERS", 28, least=0)
    return tuple(w if i >= first else None for i, w in enumerate(windows_by_layer(values, layers, every=True)))
