"""GLM-4.5 and its successors of the same shape (``glm4_moe``): grouped-query attention with partial rotation, dense
layers first, then mixtures of experts beside a shared one. Routing is that of DeepSeek V3 (arXiv 2412.19437).
"""

from __future__ import annotations

from engine.checkpoint.sizes import DecoderSizes, read_sizes
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder, Value
from engine.contracts.model import ModelConfig
from engine.contracts.ops import Act, Route
from engine_plugins.architecture.blocks import (
    activation,
    attention,
    expect_full_attention,
    expert_groups,
    experts,
    gated_mlp,
    ignore_mtp,
    top_k,
)

MTP = (46, 92)
"""Where GLM-4.5-Air and GLM-4.5 have the layer that predicts a further token."""


class GlmMoeArchitecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        values = Values({"partial_rotary_factor": 0.5, **model.raw})
        sizes, act = read_sizes(values, eps=1e-5), activation(values.text("hidden_act", "silu"))
        expect_full_attention(values)
        dense = values.whole("first_k_dense_replace", "MAX_LAYERS", 1, least=0)
        ignore_mtp(b, values, sizes.num_layers, *MTP)
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i in range(sizes.num_layers):
            name = f"model.layers.{i}"
            with b.layer(x):
                h = b.rms_norm(x, f"{name}.input_layernorm", sizes.eps)
                x = b.add(x, attention(
                    b, h, f"{name}.self_attn", sizes, rope=sizes.rope,
                    bias=values.flag("attention_bias", False), head_norm=values.flag("use_qk_norm", False),
                ))  # fmt: skip
                h = b.rms_norm(x, f"{name}.post_attention_layernorm", sizes.eps)
                if i < dense:
                    x = b.add(x, gated_mlp(b, h, f"{name}.mlp", sizes, act))
                else:
                    x = b.add(x, routed(b, h, f"{name}.mlp", sizes, values, act))
        b.lm_head(b.rms_norm(x, "model.norm", sizes.eps), "lm_head", sizes.vocab_size, tied=sizes.tied)


def routed(b: Builder, h: Value, name: str, sizes: DecoderSizes, values: Values, act: Act) -> Value:
    """Experts by sigmoid scores, corrected where they are chosen, and shared ones that every token passes."""
    count = values.whole("n_routed_experts", "MAX_EXPERTS", 128)
    size = values.whole("moe_intermediate_size", "MAX_INTERMEDIATE_SIZE", 1408)
    shared = values.whole("n_shared_experts", "MAX_EXPERTS", 1, least=0)
    chosen = top_k(values, count, 8)
    groups, chosen_groups = expert_groups(values, count, chosen)
    route = Route(
        count,
        chosen,
        "sigmoid",
        renormalize=values.flag("norm_topk_prob", True),
        scale=values.number("routed_scaling_factor", "MAX_ROPE_NUMBER", 1.0),
        correction=f"{name}.gate.e_score_correction_bias",
        groups=groups,
        chosen_groups=chosen_groups,
        group_by="top2",
    )
    made = experts(b, h, name, sizes, route, size, act)
    return b.add(made, gated_mlp(b, h, f"{name}.shared_experts", sizes, act, size=size * shared)) if shared else made
