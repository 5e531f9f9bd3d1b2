"""Gemma 4, also as the text model of checkpoints that see and hear.

Layers without a window have heads of another size, rotate a share of their pairs, and may take their keys as values.
The last layers may attend to the cache of an earlier one. Each layer may have an input of its own: an embedding of the
tokens and a projection of their common one. Mixtures of experts lie beside the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.checkpoint.files import CheckpointError, clipped
from engine.checkpoint.rope import read_rope
from engine.checkpoint.sizes import DecoderSizes, read_sizes, windows_by_layer
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder, Value
from engine.contracts.model import ModelConfig
from engine.contracts.ops import Act, FusedExperts, Gated, LinearPart, Route
from engine_plugins.architecture.blocks import (
    FULL,
    SLIDING,
    activation,
    expect,
    gated_mlp,
    o_proj,
    top_k,
    with_layer_types,
)
from engine_plugins.architecture.nested import text_model, text_part

DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    "sliding_window": 512, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256,
    "global_head_dim": 512,
}  # fmt: skip
ROPES: dict[str, Any] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
"""What ``config.json`` may leave out."""


class Gemma4Architecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return text_part(config, tied=True)

    def describe(self, model: ModelConfig, b: Builder) -> None:
        values, name, head = _values(model.raw), "model", "lm_head"
        if model.architecture == "Gemma4ForConditionalGeneration":
            name, head = text_model(b)
        sizes, types = read_sizes(values, tied=True, layer_type=FULL), values.texts("layer_types", "MAX_LAYERS")
        act = activation(values.text("hidden_activation", "gelu_pytorch_tanh"), "hidden_activation")
        windows, by_layer = windows_by_layer(values, sizes.num_layers), _sizes_by_layer(values, sizes, types)
        shared = values.whole("num_kv_shared_layers", "MAX_LAYERS", 0, least=0)
        first_shared, attended = sizes.num_layers - shared, dict[str, Value]()
        wide = 2 if values.flag("use_double_wide_mlp", False) else 1
        b.positions(sizes.max_position)
        x = b.embed(f"{name}.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        x = b.scale(x, sizes.hidden_size**0.5, rounded=True)
        inputs = _inputs(b, x, name, values, sizes)
        for i, (kind, window, its) in enumerate(zip(types, windows, by_layer, strict=True)):
            at, size = f"{name}.layers.{i}", sizes.intermediate_size * (wide if i >= first_shared else 1)
            if i >= first_shared and kind not in attended:
                raise CheckpointError(f"num_kv_shared_layers={shared}: no layer before them is of type {kind}")
            with b.layer(x):
                h = b.rms_norm(x, f"{at}.input_layernorm", sizes.eps)
                if i < first_shared:
                    a = attended[kind] = _attention(b, h, f"{at}.self_attn", values, its, window)
                else:
                    a = _shared_attention(b, h, f"{at}.self_attn", values, its, attended[kind])
                a = o_proj(b, a, f"{at}.self_attn", sizes, bias=values.flag("attention_bias", False))
                x = b.add(x, b.rms_norm(a, f"{at}.post_attention_layernorm", sizes.eps))
                h = b.rms_norm(x, f"{at}.pre_feedforward_layernorm", sizes.eps)
                m = gated_mlp(b, h, f"{at}.mlp", sizes, act, size=size)
                if values.flag("enable_moe_block", False):
                    m = b.add(b.rms_norm(m, f"{at}.post_feedforward_layernorm_1", sizes.eps),
                              _experts(b, x, at, values, sizes, act))  # fmt: skip
                x = b.add(x, b.rms_norm(m, f"{at}.post_feedforward_layernorm", sizes.eps))
                if inputs is not None:
                    x = b.add(x, _of_input(b, x, inputs, i, at, sizes, act))
                x = b.scale_by(x, f"{at}.layer_scalar")
        logits = b.lm_head(b.rms_norm(x, f"{name}.norm", sizes.eps), head, sizes.vocab_size, tied=sizes.tied)
        cap = "final_logit_softcapping"
        b.soft_cap(logits, values.number(cap, "MAX_HIDDEN_SIZE") if values.has(cap) else None)


def _values(raw: Mapping[str, Any]) -> Values:
    """With what ``config.json`` leaves out. Without ``layer_types`` every sixth layer has no window, and the last one
    has none whatever is said, as in transformers."""
    values = with_layer_types(Values({**DEFAULTS, **raw, "sliding_window_pattern": 6}))
    if values.values.get("use_bidirectional_attention") != "vision":  # of tokens of images alone
        expect(values, {"use_bidirectional_attention": None})
    ropes = values.section("rope_parameters").values or ROPES
    if not ropes.keys() <= {FULL, SLIDING}:
        raise CheckpointError(f"rope_parameters with {clipped(list(ropes))}: expected {FULL} and {SLIDING}")
    types = values.texts("layer_types", "MAX_LAYERS")
    return Values({**values.values, "rope_parameters": ropes, "layer_types": [*types[:-1], FULL]})


def _sizes_by_layer(values: Values, sizes: DecoderSizes, types: Sequence[str]) -> list[DecoderSizes]:
    """Heads and rotation of each layer: of those without a window, or as ``per_layer_config`` has them."""
    stated, found = values.whole("max_position_embeddings", "MAX_POSITION"), []
    wide = {"head_dim": values.whole("global_head_dim", "MAX_HEAD_DIM")}
    if values.flag("attention_k_eq_v", False) and values.has("num_global_key_value_heads"):
        wide["num_key_value_heads"] = values.whole("num_global_key_value_heads", "MAX_HEADS")
    by_layer = values.section("per_layer_config") if "per_layer_config" in values.values else None
    for i, kind in enumerate(types):
        own = Values(wide if kind == FULL else {}) if by_layer is None else by_layer.section(str(i))
        if unknown := own.values.keys() - {"head_dim", "num_key_value_heads"}:
            raise CheckpointError(f"per_layer_config with {clipped(sorted(unknown))}: expected head_dim and KV heads")
        dim = own.whole("head_dim", "MAX_HEAD_DIM", sizes.head_dim)
        kv_heads = own.whole("num_key_value_heads", "MAX_HEADS", sizes.num_kv_heads)
        rope = read_rope(values, dim, stated, kind)
        found.append(replace(sizes, head_dim=dim, num_kv_heads=kv_heads, rope=rope))
    return found


def _inputs(b: Builder, x: Value, name: str, values: Values, sizes: DecoderSizes) -> Value | None:
    """Inputs of all layers, one after another; none where they have no features."""
    size = values.whole("hidden_size_per_layer_input", "MAX_HIDDEN_SIZE", least=0)
    vocabulary, total = values.whole("vocab_size_per_layer_input", "MAX_VOCAB"), size * sizes.num_layers
    if not size:
        return None
    if vocabulary < sizes.vocab_size:
        raise CheckpointError(f"vocab_size_per_layer_input={vocabulary}: expected vocab_size, {sizes.vocab_size}")
    of_tokens = b.scale(b.embed(f"{name}.embed_tokens_per_layer", vocabulary, total), size**0.5, rounded=True)
    projected = b.linear(x, LinearPart(f"{name}.per_layer_model_projection", total))
    normed = b.scale(projected, sizes.hidden_size**-0.5)
    normed = b.rms_norm(normed, f"{name}.per_layer_projection_norm", sizes.eps, size=size)
    return b.scale(b.add(normed, of_tokens), 2**-0.5)


def _of_input(b: Builder, x: Value, inputs: Value, layer: int, at: str, sizes: DecoderSizes, act: Act) -> Value:
    """What a layer makes of its own input."""
    size = inputs.size // sizes.num_layers
    own = b.slice(inputs, layer * size, (layer + 1) * size)
    gated = b.gated(b.linear(x, LinearPart(f"{at}.per_layer_input_gate", size)), own, act)
    made = b.linear(gated, LinearPart(f"{at}.per_layer_projection", sizes.hidden_size))
    return b.rms_norm(made, f"{at}.post_per_layer_input_norm", sizes.eps)


def _attention(b: Builder, h: Value, name: str, values: Values, sizes: DecoderSizes, window: int | None) -> Value:
    """Without the output projection. Values are normed, too."""
    dim, bias = sizes.head_dim, values.flag("attention_bias", False)
    parts = [LinearPart(f"{name}.q_proj", sizes.num_heads * dim, bias)]
    separate = not values.flag("attention_k_eq_v", False) or window is not None
    parts += [LinearPart(f"{name}.{of}_proj", sizes.num_kv_heads * dim, bias) for of in ("kv" if separate else "k")]
    q, k, *more = b.linear(h, parts[0], parts[1], *parts[2:], shard="out")
    v = b.rms_norm(more[0] if more else k, None, sizes.eps, size=dim)
    q, k = (b.rms_norm(each, f"{name}.{of}_norm", sizes.eps, size=dim) for each, of in ((q, "q"), (k, "k")))
    q, k = b.rope(q, k, sizes.rope, dim)
    return b.attention(q, k, v, dim, scale=1.0, window=window)


def _shared_attention(b: Builder, h: Value, name: str, values: Values, sizes: DecoderSizes, earlier: Value) -> Value:
    """To the cache of an earlier layer. Weights for keys of their own, which some checkpoints have, are not read."""
    b.ignore(*(f"{name}.{of}." for of in ("k_proj", "v_proj", "k_norm", "v_norm")))
    bias = values.flag("attention_bias", False)
    q = b.linear(h, LinearPart(f"{name}.q_proj", sizes.num_heads * sizes.head_dim, bias), shard="out")
    q = b.rms_norm(q, f"{name}.q_norm", sizes.eps, size=sizes.head_dim)
    return b.attention_to(earlier, b.rotate(q, sizes.rope, sizes.head_dim), scale=1.0)


def _experts(b: Builder, x: Value, at: str, values: Values, sizes: DecoderSizes, act: Act) -> Value:
    """Of what the MLP reads before its norm, normed after."""
    count = values.whole("num_experts", "MAX_EXPERTS")
    size = values.whole("moe_intermediate_size", "MAX_INTERMEDIATE_SIZE")
    chosen = top_k(values, count, key="top_k_experts")
    route = Route(count, chosen, renormalize=True, expert_scale=f"{at}.router.per_expert_scale")
    routed = b.scale_by(b.rms_norm(x, None, sizes.eps), f"{at}.router.scale", by_feature=True)
    logits = b.router(b.scale(routed, sizes.hidden_size**-0.5), f"{at}.router.proj", count)
    gate, up = (LinearPart(f"{at}.experts.{{}}.{part}_proj", size) for part in ("gate", "up"))
    made = b.experts(
        b.rms_norm(x, f"{at}.pre_feedforward_layernorm_2", sizes.eps), logits, route, (gate, up),
        LinearPart(f"{at}.experts.{{}}.down_proj", sizes.hidden_size), Gated(act),
        fused=FusedExperts(f"{at}.experts.gate_up_proj", f"{at}.experts.down_proj"),
    )  # fmt: skip
    return b.rms_norm(made, f"{at}.post_feedforward_layernorm_2", sizes.eps)
