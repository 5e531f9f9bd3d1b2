"""DeepSeek V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): multi-head latent attention, dense layers first, then
mixtures of experts beside shared ones.

What a token leaves in the cache is one latent and one rotated key for all heads. The projections from the latent to
keys and values are absorbed: into the queries before attention, and after it into what comes out.
"""

from __future__ import annotations

import math
from dataclasses import replace

from engine.checkpoint.sizes import DecoderSizes, read_sizes
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder, Value
from engine.contracts.model import ModelConfig
from engine.contracts.ops import Act, HeadLinear, LinearPart, RopeFacts, Route
from engine_plugins.architecture.blocks import (
    activation,
    expect_plain_layers,
    expert_groups,
    experts,
    gated_mlp,
    ignore_mtp,
    top_k,
)

MTP = 61
"""Where DeepSeek-V3 has the layer that predicts a further token."""

DEFAULTS = {
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "kv_lora_rank": 512, "v_head_dim": 128, "n_shared_experts": 2,
    "first_k_dense_replace": 0, "n_routed_experts": 64, "moe_intermediate_size": 1407, "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
}  # fmt: skip
OF_V3 = {
    "n_shared_experts": 1, "first_k_dense_replace": 3, "n_routed_experts": 256, "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
}  # fmt: skip


class DeepseekArchitecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        is_v3 = model.architecture == "DeepseekV3ForCausalLM"
        given = {key: value for key, value in model.raw.items() if value is not None or key == "q_lora_rank"}
        values = Values({**DEFAULTS, **(OF_V3 if is_v3 else {}), **given})
        rope_dim = values.whole("qk_rope_head_dim", "MAX_HEAD_DIM")
        sizes = read_sizes(Values({**values.values, "head_dim": rope_dim, "num_key_value_heads": None}))
        expect_plain_layers(values, sizes)
        act = activation(values.text("hidden_act", "silu"))
        dense = values.whole("first_k_dense_replace", "MAX_LAYERS", least=0)
        rope = replace(sizes.rope, rotary_dim=rope_dim, interleaved=values.flag("rope_interleave", True))
        if is_v3:
            ignore_mtp(b, values, sizes.num_layers, MTP)
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i in range(sizes.num_layers):
            name = f"model.layers.{i}"
            with b.layer(x):
                h = b.rms_norm(x, f"{name}.input_layernorm", sizes.eps)
                x = b.add(x, _attention(b, h, values, sizes, rope, f"{name}.self_attn"))
                h = b.rms_norm(x, f"{name}.post_attention_layernorm", sizes.eps)
                if i < dense:
                    x = b.add(x, gated_mlp(b, h, f"{name}.mlp", sizes, act))
                else:
                    x = b.add(x, _experts(b, h, values, sizes, act, f"{name}.mlp", is_v3))
        b.lm_head(b.rms_norm(x, "model.norm", sizes.eps), "lm_head", sizes.vocab_size, tied=sizes.tied)


def _attention(b: Builder, h: Value, values: Values, sizes: DecoderSizes, rope: RopeFacts, name: str) -> Value:
    heads, turned = sizes.num_heads, sizes.head_dim
    plain = values.whole("qk_nope_head_dim", "MAX_HEAD_DIM")
    rank, out = values.whole("kv_lora_rank", "MAX_HIDDEN_SIZE"), values.whole("v_head_dim", "MAX_HEAD_DIM")
    dim, bias, eps = plain + turned, values.flag("attention_bias", False), 1e-6
    if values.has("q_lora_rank"):
        low = LinearPart(f"{name}.q_a_proj", values.whole("q_lora_rank", "MAX_HIDDEN_SIZE"), bias)
        read = b.rms_norm(b.linear(h, low), f"{name}.q_a_layernorm", eps)
        q = b.linear(read, LinearPart(f"{name}.q_b_proj", heads * dim), shard="out")
    else:
        q = b.linear(h, LinearPart(f"{name}.q_proj", heads * dim), shard="out")
    latent, key = b.split(h, LinearPart(f"{name}.kv_a_proj_with_mqa", rank + turned, bias, (rank, turned)))
    latent = b.rms_norm(latent, f"{name}.kv_a_layernorm", eps)
    q, key = b.rotate(q, rope, dim, start=plain), b.rotate(key, rope, turned)
    up = HeadLinear(f"{name}.kv_b_proj", heads, plain + out, rank, 0, plain, transposed=True)
    absorbed = b.head_linear(b.head_slice(q, dim, 0, plain), up)
    q = b.head_join(absorbed, b.head_slice(q, dim, plain, dim), heads)
    a = b.latent_attention(q, b.head_join(latent, key, 1), rank, scale=_scale(rope, dim))
    a = b.head_linear(a, replace(up, start=plain, stop=plain + out, transposed=False))
    return b.linear(a, LinearPart(f"{name}.o_proj", sizes.hidden_size, bias), shard="in")


def _scale(rope: RopeFacts, dim: int) -> float:
    """YaRN's correction of queries and keys is part of the scale."""
    weight = float(rope.params.get("mscale_all_dim") or 0.0)
    factor = float(rope.params.get("factor") or 1.0)
    corrected = 0.1 * weight * math.log(factor) + 1.0 if weight and factor > 1.0 else 1.0
    return float(dim**-0.5 * corrected**2)


def _experts(b: Builder, h: Value, values: Values, sizes: DecoderSizes, act: Act, name: str, is_v3: bool) -> Value:
    size = values.whole("moe_intermediate_size", "MAX_INTERMEDIATE_SIZE")
    shared = values.whole("n_shared_experts", "MAX_EXPERTS")
    grouped = is_v3 or values.text("topk_method", "greedy") == "group_limited_greedy"
    count = values.whole("n_routed_experts", "MAX_EXPERTS")
    chosen = top_k(values, count)
    groups, chosen_groups = expert_groups(values, count, chosen) if grouped else (1, 1)
    route = Route(
        count,
        chosen,
        "sigmoid" if is_v3 else "softmax",
        # V2's reference ignores norm_topk_prob.
        renormalize=is_v3 and values.flag("norm_topk_prob", True),
        scale=values.number("routed_scaling_factor", "MAX_ROPE_NUMBER"),
        correction=f"{name}.gate.e_score_correction_bias" if is_v3 else None,
        groups=groups,
        chosen_groups=chosen_groups,
        group_by="top2" if is_v3 else "max",
    )
    made = experts(b, h, name, sizes, route, size, act)
    return b.add(made, gated_mlp(b, h, f"{name}.shared_experts", sizes, act, size=size * shared))
