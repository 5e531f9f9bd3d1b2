"""Llama 2/3.x, Mistral, Qwen2/2.5 and Qwen3 (dense) as typed ops.

One shape serves them all: pre-norm attention with grouped KV heads and rotary positions, then a gated MLP. They
differ in biases, in a norm of query and key heads (Qwen3), and in which layers have a window.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.config import SlotConfig
from engine.contracts.model import ModelFacts
from engine.contracts.ops import (
    Attention,
    DownResidual,
    Embed,
    LayerOp,
    LinearPart,
    LinearSpec,
    LMHead,
    ModelOps,
    NormGateUpAct,
    NormQKVRopeWrite,
    NormSpec,
    OutResidual,
)
from engine.contracts.provider import BuildContext
from engine_plugins.architecture.config import ACTIVATIONS, LLAMA_LIKE


@dataclass(frozen=True, slots=True)
class _Variant:
    """How a family departs from plain Llama."""

    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool


class LlamaArchitecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig, context: BuildContext) -> None:
        pass

    def describe(self, model: ModelFacts) -> ModelOps:
        """Raises ``ValueError`` for an activation or a family this file does not know."""
        variant = _variant(model)
        final_norm = NormSpec("model.norm", model.rms_norm_eps)
        head = LinearSpec((LinearPart("lm_head", model.vocab_size),), model.hidden_size, shard="out", kind="head")
        return ModelOps(
            embed=Embed("model.embed_tokens", model.vocab_size, model.hidden_size),
            layers=tuple(_layer(model, variant, i) for i in range(model.num_layers)),
            head=LMHead(final_norm, head, tied=model.tie_embeddings),
        )


def _variant(model: ModelFacts) -> _Variant:
    attention_bias = bool(model.raw.get("attention_bias", False))
    match model.architecture:
        case "LlamaForCausalLM":
            mlp_bias = bool(model.raw.get("mlp_bias", False))
            return _Variant(attention_bias, attention_bias, mlp_bias, qk_norm=False)
        case "MistralForCausalLM":
            return _Variant(False, False, False, qk_norm=False)
        case "Qwen2ForCausalLM":
            return _Variant(True, False, False, qk_norm=False)
        case "Qwen3ForCausalLM":
            return _Variant(attention_bias, attention_bias, False, qk_norm=True)
    raise ValueError(
        f"architecture {model.architecture!r} of the checkpoint: expected one of {', '.join(LLAMA_LIKE)}; "
        "choose another plugin with architecture=<name>"
    )


def _layer(model: ModelFacts, variant: _Variant, index: int) -> tuple[LayerOp, ...]:
    prefix = f"model.layers.{index}"
    return (*_attention_ops(model, variant, prefix, index), *_mlp_ops(model, variant, prefix))


def _attention_ops(model: ModelFacts, variant: _Variant, prefix: str, index: int) -> tuple[LayerOp, ...]:
    name, dim, eps = f"{prefix}.self_attn", model.head_dim, model.rms_norm_eps
    q_size, kv_size = model.num_heads * dim, model.num_kv_heads * dim
    qkv = LinearSpec(
        (
            LinearPart(f"{name}.q_proj", q_size, variant.qkv_bias),
            LinearPart(f"{name}.k_proj", kv_size, variant.qkv_bias),
            LinearPart(f"{name}.v_proj", kv_size, variant.qkv_bias),
        ),
        model.hidden_size,
        shard="out",
    )
    out = LinearSpec((LinearPart(f"{name}.o_proj", model.hidden_size, variant.out_bias),), q_size, shard="in")
    return (
        NormQKVRopeWrite(
            norm=NormSpec(f"{prefix}.input_layernorm", eps),
            qkv=qkv,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=dim,
            rope=model.rope,
            q_norm=NormSpec(f"{name}.q_norm", eps) if variant.qk_norm else None,
            k_norm=NormSpec(f"{name}.k_norm", eps) if variant.qk_norm else None,
        ),
        Attention(
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=dim,
            scale=dim**-0.5,
            window=model.layer_windows[index],
        ),
        OutResidual(out),
    )


def _mlp_ops(model: ModelFacts, variant: _Variant, prefix: str) -> tuple[LayerOp, ...]:
    act = ACTIVATIONS.get(model.hidden_act)
    if act is None:
        raise ValueError(f"hidden_act {model.hidden_act!r} of the checkpoint: expected one of {', '.join(ACTIVATIONS)}")
    name, size, bias = f"{prefix}.mlp", model.intermediate_size, variant.mlp_bias
    gate_up = LinearSpec(
        (LinearPart(f"{name}.gate_proj", size, bias), LinearPart(f"{name}.up_proj", size, bias)),
        model.hidden_size,
        shard="out",
        kind="gate_up",
    )
    down = LinearSpec((LinearPart(f"{name}.down_proj", model.hidden_size, bias),), size, shard="in")
    norm = NormSpec(f"{prefix}.post_attention_layernorm", model.rms_norm_eps)
    return (NormGateUpAct(norm, gate_up, act), DownResidual(down))
