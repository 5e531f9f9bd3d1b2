"""Families whose feed-forward networks are mixtures of experts: Mixtral (arXiv 2401.04088), Qwen2-MoE and Qwen3-MoE.

Attention is that of their dense twins.
"""

from __future__ import annotations

from typing import Any

from engine.checkpoint.sizes import DecoderSizes, read_sizes, windows_by_layer
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder, Value
from engine.contracts.model import ModelConfig
from engine.contracts.ops import Act, Gated, LinearPart, Route
from engine_plugins.architecture.blocks import activation, attention, experts, gated_mlp
from engine_plugins.architecture.llama import qwen_windows

QWEN2: dict[str, Any] = {
    "num_experts": 60, "moe_intermediate_size": 1408, "num_experts_per_tok": 4,
    "shared_expert_intermediate_size": 5632,
}  # fmt: skip
QWEN3: dict[str, Any] = {"num_experts": 128, "moe_intermediate_size": 768, "num_experts_per_tok": 8}
"""What ``config.json`` may leave out."""


class MixtralArchitecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        values = Values({"rope_theta": 1e6, **model.raw})
        sizes, act = read_sizes(values, eps=1e-5), activation(values.text("hidden_act", "silu"))
        windows = windows_by_layer(values, sizes.num_layers, every=True)
        count = values.whole("num_local_experts", "MAX_EXPERTS", 8)
        route = Route(count, values.whole("num_experts_per_tok", "MAX_EXPERTS", 2), renormalize=True)
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i, window in enumerate(windows):
            name = f"model.layers.{i}"
            with b.layer(x):
                h = b.rms_norm(x, f"{name}.input_layernorm", sizes.eps)
                x = b.add(x, attention(b, h, f"{name}.self_attn", sizes, rope=sizes.rope, window=window))
                h = b.rms_norm(x, f"{name}.post_attention_layernorm", sizes.eps)
                moe = f"{name}.block_sparse_moe"
                x = b.add(x, b.experts(
                    h, b.router(h, f"{moe}.gate", count), route,
                    (_part(moe, "w1", sizes.intermediate_size), _part(moe, "w3", sizes.intermediate_size)),
                    _part(moe, "w2", sizes.hidden_size), Gated(act),
                ))  # fmt: skip
        b.lm_head(b.rms_norm(x, "model.norm", sizes.eps), "lm_head", sizes.vocab_size, tied=sizes.tied)


class QwenMoeArchitecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        second = model.architecture == "Qwen2MoeForCausalLM"
        values = Values({**(QWEN2 if second else QWEN3), **model.raw})
        sizes, act = read_sizes(values), activation(values.text("hidden_act", "silu"))
        bias = values.flag("qkv_bias", True) if second else values.flag("attention_bias", False)
        windows = qwen_windows(values, sizes.num_layers)
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i, window in enumerate(windows):
            name = f"model.layers.{i}"
            with b.layer(x):
                h = b.rms_norm(x, f"{name}.input_layernorm", sizes.eps)
                x = b.add(x, attention(
                    b, h, f"{name}.self_attn", sizes, rope=sizes.rope, window=window,
                    bias=bias, out_bias=bias and not second, head_norm=not second,
                ))  # fmt: skip
                h = b.rms_norm(x, f"{name}.post_attention_layernorm", sizes.eps)
                if is_sparse(values, i):
                    x = b.add(x, qwen_experts(b, h, values, f"{name}.mlp", sizes, act, shared=second))
                else:
                    x = b.add(x, gated_mlp(b, h, f"{name}.mlp", sizes, act))
        b.lm_head(b.rms_norm(x, "model.norm", sizes.eps), "lm_head", sizes.vocab_size, tied=sizes.tied)


def is_sparse(values: Values, layer: int) -> bool:
    """Whether a layer has experts: every ``decoder_sparse_step``-th but for ``mlp_only_layers``."""
    step = values.whole("decoder_sparse_step", "MAX_LAYERS", 1)
    dense = values.wholes("mlp_only_layers", "MAX_LAYERS", largest="MAX_LAYERS")
    return layer not in dense and (layer + 1) % step == 0


def qwen_experts(
    b: Builder, h: Value, values: Values, name: str, sizes: DecoderSizes, act: Act, *, shared: bool
) -> Value:
    """Experts by softmax scores; ``shared``: beside one that every token passes, behind a gate."""
    count = values.whole("num_local_experts" if values.has("num_local_experts") else "num_experts", "MAX_EXPERTS")
    size = values.whole("moe_intermediate_size", "MAX_INTERMEDIATE_SIZE")
    chosen = values.whole("num_experts_per_tok", "MAX_EXPERTS")
    route = Route(count, chosen, renormalize=values.flag("norm_topk_prob", False))
    made = experts(b, h, name, sizes, route, size, act)
    if not shared:
        return made
    shared_size = values.whole("shared_expert_intermediate_size", "MAX_INTERMEDIATE_SIZE")
    common = gated_mlp(b, h, f"{name}.shared_expert", sizes, act, size=shared_size)
    return b.add(made, b.gate(common, b.linear(h, LinearPart(f"{name}.shared_expert_gate", 1))))


def _part(name: str, part: str, size: int) -> LinearPart:
    return LinearPart(f"{name}.experts.{{}}.{part}", size)
