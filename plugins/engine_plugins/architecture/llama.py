"""Llama 2/3.x, Mistral, Qwen2/2.5 and Qwen3 (dense).

One shape serves them all: pre-norm attention with grouped KV heads and rotary positions, then a gated MLP. They
differ in biases, in a norm of query and key heads (Qwen3), and in which layers have a window.
"""

from __future__ import annotations

from engine.checkpoint.sizes import read_sizes, windows_by_layer
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder
from engine.contracts.model import ModelConfig
from engine_plugins.architecture.blocks import activation, attention, gated_mlp


class LlamaArchitecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        values, family = Values(model.raw), model.architecture
        sizes, act = read_sizes(values), activation(values.text("hidden_act", "silu"))
        windows = _windows(values, family, sizes.num_layers)
        may_have_bias = family in ("LlamaForCausalLM", "Qwen3ForCausalLM")
        bias = may_have_bias and values.flag("attention_bias", False)
        mlp_bias = family == "LlamaForCausalLM" and values.flag("mlp_bias", False)
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i in range(sizes.num_layers):
            name = f"model.layers.{i}"
            with b.layer(x):
                h = b.rms_norm(x, f"{name}.input_layernorm", sizes.eps)
                x = b.add(x, attention(
                    b, h, f"{name}.self_attn", sizes, rope=sizes.rope, window=windows[i],
                    bias=bias or family == "Qwen2ForCausalLM", out_bias=bias, head_norm=family == "Qwen3ForCausalLM",
                ))  # fmt: skip
                h = b.rms_norm(x, f"{name}.post_attention_layernorm", sizes.eps)
                x = b.add(x, gated_mlp(b, h, f"{name}.mlp", sizes, act, bias=mlp_bias))
        b.lm_head(b.rms_norm(x, "model.norm", sizes.eps), "lm_head", sizes.vocab_size, tied=sizes.tied)


def _windows(values: Values, family: str, layers: int) -> tuple[int | None, ...]:
    """Llama has none, Mistral one in every layer."""
    if family == "MistralForCausalLM":
        return windows_by_layer(values, layers, every=True)
    return (None,) * layers if family == "LlamaForCausalLM" else qwen_windows(values, layers)


def qwen_windows(values: Values, layers: int) -> tuple[int | None, ...]:
    """Where ``use_sliding_window`` says so: in the layers of ``layer_types``, or from ``max_window_layers`` on."""
    if not values.flag("use_sliding_window", False):
        return (None,) * layers
    if values.has("layer_types"):
        return windows_by_layer(values, layers)
    first = values.whole("max_window_layers", "MAX_LAYERS", 28, least=0)
    return tuple(w if i >= first else None for i, w in enumerate(windows_by_layer(values, layers, every=True)))
