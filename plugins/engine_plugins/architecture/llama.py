"""Llama 2/3.x, Mistral, Qwen2/2.5 and Qwen3 (dense): pre-norm attention with rotary positions, then a gated MLP.

They differ in biases, in a norm of query and key heads (Qwen3), and in which layers have a window.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder, Value
from engine.contracts.model import ModelFacts
from engine.contracts.ops import LinearPart
from engine.contracts.provider import BuildContext
from engine_plugins.architecture.config import ACTIVATIONS


@dataclass(frozen=True, slots=True)
class _Variant:
    """How a family departs from plain Llama."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


class LlamaArchitecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig, context: BuildContext) -> None:
        pass

    def describe(self, model: ModelFacts, b: Builder) -> None:
        """Raises ``ValueError`` for an activation or a family this file does not know."""
        variant, eps = _variant(model), model.rms_norm_eps
        x = b.embed("model.embed_tokens", model.vocab_size, model.hidden_size)
        for i in range(model.num_layers):
            name = f"model.layers.{i}"
            with b.layer(x):
                h = b.rms_norm(x, f"{name}.input_layernorm", eps)
                x = b.add(x, _attention(b, h, model, variant, f"{name}.self_attn", model.layer_windows[i]))
                h = b.rms_norm(x, f"{name}.post_attention_layernorm", eps)
                x = b.add(x, _mlp(b, h, model, variant, f"{name}.mlp"))
        b.lm_head(b.rms_norm(x, "model.norm", eps), "lm_head", model.vocab_size, tied=model.tie_embeddings)


def _attention(b: Builder, h: Value, model: ModelFacts, variant: _Variant, name: str, window: int | None) -> Value:
    dim, bias = model.head_dim, variant.qkv_bias
    sizes = (("q", model.num_heads * dim), ("k", model.num_kv_heads * dim), ("v", model.num_kv_heads * dim))
    q_proj, k_proj, v_proj = (LinearPart(f"{name}.{part}_proj", size, bias) for part, size in sizes)
    q, k, v = b.linear(h, q_proj, k_proj, v_proj, shard="out")
    if variant.qk_norm:
        q = b.rms_norm(q, f"{name}.q_norm", model.rms_norm_eps, size=dim)
        k = b.rms_norm(k, f"{name}.k_norm", model.rms_norm_eps, size=dim)
    q, k = b.rope(q, k, model.rope, dim)
    a = b.attention(q, k, v, dim, window=window)
    return b.linear(a, LinearPart(f"{name}.o_proj", model.hidden_size, variant.out_bias), shard="in")


def _mlp(b: Builder, h: Value, model: ModelFacts, variant: _Variant, name: str) -> Value:
    if model.hidden_act not in ACTIVATIONS:
        raise ValueError(f"hidden_act {model.hidden_act!r} of the checkpoint: expected one of {', '.join(ACTIVATIONS)}")
    parts = (LinearPart(f"{name}.{part}_proj", model.intermediate_size, variant.mlp_bias) for part in ("gate", "up"))
    gate, up = b.linear(h, *parts, shard="out")
    down = LinearPart(f"{name}.down_proj", model.hidden_size, variant.mlp_bias)
    return b.linear(b.gated(gate, up, ACTIVATIONS[model.hidden_act]), down, shard="in")


def _variant(model: ModelFacts) -> _Variant:
    bias, mlp_bias = (bool(model.raw.get(key, False)) for key in ("attention_bias", "mlp_bias"))
    variants = {
        "LlamaForCausalLM": _Variant(bias, bias, mlp_bias),
        "MistralForCausalLM": _Variant(),
        "Qwen2ForCausalLM": _Variant(qkv_bias=True),
        "Qwen3ForCausalLM": _Variant(bias, bias, qk_norm=True),
    }
    if model.architecture not in variants:
        raise ValueError(f"{model.architecture} is none of {', '.join(variants)}: choose a plugin with architecture=NAME")
    return variants[model.architecture]
