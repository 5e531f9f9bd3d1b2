"""Gemma 1 (arXiv 2403.08295), Gemma 2 (arXiv 2408.00118) and Gemma 3 (arXiv 2503.19786), also as the text model of
checkpoints that see images.

Embeddings are scaled, weights of norms are stored less 1. From Gemma 2 on attention and MLP are normed before and
after. Gemma 2 caps scores and logits. Gemma 3 norms heads, and layers with a window rotate by their own frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.checkpoint.files import clipped
from engine.checkpoint.rope import read_rope
from engine.checkpoint.sizes import read_sizes, windows_by_layer
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder, Value
from engine.contracts.model import ModelConfig
from engine_plugins.architecture.blocks import (
    FULL,
    SLIDING,
    activation,
    attention,
    expect,
    expect_full_attention,
    expect_whole_rotation,
    gated_mlp,
    with_layer_types,
)
from engine_plugins.architecture.nested import text_model, text_part

COMMON: dict[str, Any] = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
GEMMA1 = {
    "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192,
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
GEMMA2 = COMMON | {
    "vocab_size": 256000, "max_position_embeddings": 8192, "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip
GEMMA3 = COMMON | {"vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6}
"""What ``config.json`` may leave out. Every so many-th layer has no window."""


class GemmaArchitecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return text_part(config)

    def describe(self, model: ModelConfig, b: Builder) -> None:
        read = {"GemmaForCausalLM": _gemma1, "Gemma2ForCausalLM": _gemma2}.get(model.architecture, _gemma3)
        values, first, third = read(model.raw), read is _gemma1, read is _gemma3
        expect(values, {"use_bidirectional_attention": False})
        name, head = "model", "lm_head"
        if model.architecture == "Gemma3ForConditionalGeneration":
            name, head = text_model(b)
        sizes = read_sizes(values, tied=True, layer_type=FULL)
        stated = values.whole("max_position_embeddings", "MAX_POSITION")
        local = read_rope(values, sizes.head_dim, stated, SLIDING)
        expect_whole_rotation(sizes)
        expect_whole_rotation(replace(sizes, rope=local))
        key = "hidden_act" if first else "hidden_activation"
        act = activation(values.text(key, "gelu_pytorch_tanh"), key)
        score_cap, logit_cap = (_cap(values, f"{of}_logit_softcapping") for of in ("attn", "final"))
        bias = values.flag("attention_bias", False)
        scale = values.number("query_pre_attn_scalar", "MAX_HIDDEN_SIZE") ** -0.5

        def norm(x: Value, norm: str) -> Value:
            return b.rms_norm(x, norm, sizes.eps, offset=1.0)

        b.positions(stated)  # after scaling, whatever the rotation
        x = b.embed(f"{name}.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        x = b.scale(x, sizes.hidden_size**0.5, rounded=True)
        for i, window in enumerate(windows_by_layer(values, sizes.num_layers)):
            at = f"{name}.layers.{i}"
            with b.layer(x):
                a = attention(
                    b, norm(x, f"{at}.input_layernorm"), f"{at}.self_attn", sizes,
                    rope=sizes.rope if window is None else local, window=window, bias=bias, out_bias=bias,
                    head_norm=third, norm_offset=1.0, scale=scale, soft_cap=score_cap,
                )  # fmt: skip
                x = b.add(x, a if first else norm(a, f"{at}.post_attention_layernorm"))
                before = "post_attention_layernorm" if first else "pre_feedforward_layernorm"
                m = gated_mlp(b, norm(x, f"{at}.{before}"), f"{at}.mlp", sizes, act)
                x = b.add(x, m if first else norm(m, f"{at}.post_feedforward_layernorm"))
        logits = b.lm_head(norm(x, f"{name}.norm"), head, sizes.vocab_size, tied=sizes.tied)
        b.soft_cap(logits, logit_cap)


def _gemma1(raw: Mapping[str, Any]) -> Values:
    """The configuration in the words of Gemma 2. What it calls ``gelu`` is the approximation."""
    values = Values({**GEMMA1, **{key: value for key, value in raw.items() if value is not None}})
    expect_full_attention(values)
    expect(values, {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    act = values.text("hidden_act", "gelu")
    act = "gelu_pytorch_tanh" if act == "gelu" else act
    dim = values.whole("head_dim", "MAX_HEAD_DIM")
    return Values({**values.values, "hidden_act": act, "query_pre_attn_scalar": dim, "sliding_window": None})


def _gemma2(raw: Mapping[str, Any]) -> Values:
    return with_layer_types(Values({**GEMMA2, **raw}))


def _gemma3(raw: Mapping[str, Any]) -> Values:
    """The configuration with what it leaves out and rotations by type of layer, as new checkpoints have them. Old ones
    scale that of layers without a window only."""
    values = with_layer_types(Values({**GEMMA3, **raw}))
    expect(values, {"attn_logit_softcapping": None})
    given = values.section("rope_parameters")
    if not given.values.keys() <= {FULL, SLIDING}:
        raise ValueError(f"rope_parameters with {clipped(list(given.values))}: expected {FULL} and {SLIDING}")
    theta = values.number("rope_theta", "MAX_ROPE_THETA", 1e6)
    local_theta = values.number("rope_local_base_freq", "MAX_ROPE_THETA", 1e4)
    ropes = {
        FULL: {"rope_theta": theta, **given.section(FULL).values, **values.section("rope_scaling").values},
        SLIDING: {"rope_theta": local_theta, **given.section(SLIDING).values},
    }
    return Values({**values.values, "rope_parameters": ropes, "rope_scaling": None})


def _cap(values: Values, key: str) -> float | None:
    return values.number(key, "MAX_HIDDEN_SIZE") if values.has(key) else None
