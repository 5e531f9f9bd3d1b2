"""Qwen3-Next and Qwen3.5, dense and with experts: three of four layers are gated delta networks (arXiv 2412.06464),
whose memory does not grow with a sequence; the others are attention with gates on what comes out.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from engine.checkpoint.files import CheckpointError, clipped
from engine.checkpoint.sizes import DecoderSizes, read_sizes
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder, Value
from engine.contracts.model import ModelConfig
from engine.contracts.ops import Act, DeltaRule, LinearPart
from engine_plugins.architecture.blocks import FULL, activation, gated_mlp, o_proj
from engine_plugins.architecture.experts import is_sparse, qwen_experts
from engine_plugins.architecture.nested import text_model, text_part

LINEAR = "linear_attention"
"""A type of layers in ``config.json``."""
NEXT: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10,
    "num_experts": 512, "norm_topk_prob": True,
}  # fmt: skip
DENSE = NEXT | {
    "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
    "num_key_value_heads": 4, "num_experts": 0,
}  # fmt: skip
SPARSE = NEXT | {"vocab_size": 248320, "num_hidden_layers": 40, "num_experts_per_tok": 8, "num_experts": 256}
"""What ``config.json`` may leave out."""


class QwenNextArchitecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return text_part(config)

    def describe(self, model: ModelConfig, b: Builder) -> None:
        first = model.architecture == "Qwen3NextForCausalLM"
        defaults = NEXT if first else SPARSE if "Moe" in model.architecture else DENSE
        values, name, head = Values({**defaults, **model.raw}), "model", "lm_head"
        if model.architecture.endswith("ForConditionalGeneration"):
            name, head = text_model(b)
        b.ignore("mtp.", "model.visual.")
        sizes, act = read_sizes(values), activation(values.text("hidden_act", "silu"))
        b.positions(sizes.max_position)
        x = b.embed(f"{name}.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i, kind in enumerate(_layer_types(values, sizes.num_layers)):
            at = f"{name}.layers.{i}"
            with b.layer(x):
                h = b.rms_norm(x, f"{at}.input_layernorm", sizes.eps, offset=1.0)
                if kind == LINEAR:
                    x = b.add(x, _delta_network(b, h, f"{at}.linear_attn", sizes, values, act, fused=first))
                else:
                    x = b.add(x, _gated_attention(b, h, f"{at}.self_attn", sizes, values))
                h = b.rms_norm(x, f"{at}.post_attention_layernorm", sizes.eps, offset=1.0)
                if values.values["num_experts"] and is_sparse(values, i):
                    x = b.add(x, qwen_experts(b, h, values, f"{at}.mlp", sizes, act, shared=True))
                else:
                    x = b.add(x, gated_mlp(b, h, f"{at}.mlp", sizes, act))
        x = b.rms_norm(x, f"{name}.norm", sizes.eps, offset=1.0)
        b.lm_head(x, head, sizes.vocab_size, tied=sizes.tied)


def _layer_types(values: Values, layers: int) -> tuple[str, ...]:
    """Where they are missing, every ``full_attention_interval``-th layer is attention."""
    if not values.has("layer_types"):
        interval = values.whole("full_attention_interval", "MAX_LAYERS", 4)
        return tuple(LINEAR if (i + 1) % interval else FULL for i in range(layers))
    types = tuple(values.texts("layer_types", "MAX_LAYERS"))
    if len(types) != layers:
        raise CheckpointError(f"layer_types has {len(types)} entries for {layers} layers")
    if unknown := set(types) - {LINEAR, FULL}:
        raise CheckpointError(f"layer_types {clipped(sorted(unknown))}: expected {LINEAR} or {FULL}")
    return types


def _gated_attention(b: Builder, h: Value, name: str, sizes: DecoderSizes, values: Values) -> Value:
    dim, bias = sizes.head_dim, values.flag("attention_bias", False)
    widths = {"q": 2 * sizes.num_heads * dim, "k": sizes.num_kv_heads * dim, "v": sizes.num_kv_heads * dim}
    parts = (LinearPart(f"{name}.{part}_proj", width, bias) for part, width in widths.items())
    both, k, v = b.linear(h, *parts, shard="out")
    q, gate = b.head_slice(both, 2 * dim, 0, dim), b.head_slice(both, 2 * dim, dim, 2 * dim)
    q = b.rms_norm(q, f"{name}.q_norm", sizes.eps, size=dim, offset=1.0)
    k = b.rms_norm(k, f"{name}.k_norm", sizes.eps, size=dim, offset=1.0)
    a = b.attention(*b.rope(q, k, sizes.rope, dim), v, dim)
    return o_proj(b, b.gate(a, gate), name, sizes, bias=bias)


def _delta_network(
    b: Builder, h: Value, name: str, sizes: DecoderSizes, values: Values, act: Act, *, fused: bool
) -> Value:
    """``fused``: what is projected lies together in two tensors, else in four."""
    key_heads, heads = (values.whole(f"linear_num_{part}_heads", "MAX_HEADS") for part in ("key", "value"))
    key_dim, dim = (values.whole(f"linear_{part}_head_dim", "MAX_HEAD_DIM") for part in ("key", "value"))
    if heads % key_heads:
        raise CheckpointError(f"linear_num_value_heads={heads} is not a multiple of linear_num_key_heads={key_heads}")
    keys, outputs, of_key = key_heads * key_dim, heads * dim, heads // key_heads
    if fused:  # for each key head its queries, keys, values, ...
        width, of_values = 2 * key_dim + 2 * of_key * dim, 2 * key_dim + of_key * dim
        both = b.linear(h, LinearPart(f"{name}.in_proj_qkvz", key_heads * width))
        ends = (0, key_dim, 2 * key_dim, of_values, width)
        q, k, v, z = (b.head_slice(both, width, start, end) for start, end in pairwise(ends))
        two = b.linear(h, LinearPart(f"{name}.in_proj_ba", 2 * heads))
        write, decay = b.head_slice(two, 2 * of_key, 0, of_key), b.head_slice(two, 2 * of_key, of_key, 2 * of_key)
    else:
        slices = (keys, keys, outputs)
        q, k, v = b.split(h, LinearPart(f"{name}.in_proj_qkv", sum(slices), slices=slices))
        z = b.linear(h, LinearPart(f"{name}.in_proj_z", outputs))
        write, decay = b.linear(h, LinearPart(f"{name}.in_proj_b", heads), LinearPart(f"{name}.in_proj_a", heads))
    kernel = values.whole("linear_conv_kernel_dim", "MAX_HEADS", least=2)
    q, k, v = b.short_conv([q, k, v], f"{name}.conv1d", kernel, act)
    rule = DeltaRule(key_heads, key_dim, heads, dim, f"{name}.A_log", f"{name}.dt_bias")
    a = b.rms_norm(b.delta_rule(q, k, v, write, decay, rule), f"{name}.norm", sizes.eps, size=dim)
    return b.linear(b.gated(z, a, "silu"), LinearPart(f"{name}.out_proj", sizes.hidden_size))
