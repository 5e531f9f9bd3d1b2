"""OLMo 2 and 3: norms after attention and MLP instead of before them, and one over all queries and one over all keys
(arXiv 2501.00656). OLMo 3 has windows in three layers of four, and a rotation for each type of layers."""

from __future__ import annotations

from typing import Any

from engine.checkpoint.files import CheckpointError, clipped
from engine.checkpoint.sizes import DecoderSizes, read_sizes, windows_by_layer
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder, Value
from engine.contracts.model import ModelConfig
from engine.contracts.ops import RopeFacts
from engine_plugins.architecture.blocks import (
    FULL,
    SLIDING,
    activation,
    expect,
    expect_plain_layers,
    expect_whole_rotation,
    gated_mlp,
    o_proj,
    qkv_proj,
    with_layer_types,
)

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50304, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
}  # fmt: skip
OLMO3: dict[str, Any] = {"sliding_window": 4096, "rope_theta": 5e5}
"""What ``config.json`` may leave out."""

Layer = tuple[RopeFacts, int | None]
"""Its rotation and its window."""


class OlmoArchitecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        values = Values({**DEFAULTS, **model.raw})
        sizes, layers = _olmo3(values) if model.architecture == "Olmo3ForCausalLM" else _olmo2(values)
        act, bias = activation(values.text("hidden_act", "silu")), values.flag("attention_bias", False)
        expect(values, {"clip_qkv": None})
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i, layer in enumerate(layers):
            name = f"model.layers.{i}"
            with b.layer(x):
                a = _attention(b, x, f"{name}.self_attn", sizes, layer, bias)
                x = b.add(x, b.rms_norm(a, f"{name}.post_attention_layernorm", sizes.eps))
                m = gated_mlp(b, x, f"{name}.mlp", sizes, act)
                x = b.add(x, b.rms_norm(m, f"{name}.post_feedforward_layernorm", sizes.eps))
        b.lm_head(b.rms_norm(x, "model.norm", sizes.eps), "lm_head", sizes.vocab_size, tied=sizes.tied)


def _attention(b: Builder, x: Value, name: str, sizes: DecoderSizes, layer: Layer, bias: bool) -> Value:
    rope, window = layer
    q, k, v = qkv_proj(b, x, name, sizes, bias=bias)
    q, k = b.rms_norm(q, f"{name}.q_norm", sizes.eps), b.rms_norm(k, f"{name}.k_norm", sizes.eps)
    q, k = b.rope(q, k, rope, sizes.head_dim)
    return o_proj(b, b.attention(q, k, v, sizes.head_dim, window=window), name, sizes, bias=bias)


def _olmo2(values: Values) -> tuple[DecoderSizes, list[Layer]]:
    sizes = read_sizes(values)
    expect_plain_layers(values, sizes)
    return sizes, [(sizes.rope, None)] * sizes.num_layers


def _olmo3(values: Values) -> tuple[DecoderSizes, list[Layer]]:
    # Beside rope_parameters, transformers reads it for layers without a window alone.
    expect(values, {"rope_theta": OLMO3["rope_theta"]})
    values = with_layer_types(Values({**OLMO3, **values.values, "sliding_window_pattern": 4}))
    full, sliding = (read_sizes(_of_type(values, kind)) for kind in (FULL, SLIDING))
    expect_whole_rotation(full)
    expect_whole_rotation(sliding)
    windows = windows_by_layer(values, full.num_layers)
    return full, [(full.rope if window is None else sliding.rope, window) for window in windows]


def _of_type(values: Values, kind: str) -> Values:
    """``values`` with the rotation of one type of layers: ``rope_scaling`` is that of those without a window."""
    by_type = values.section("rope_parameters")
    if unknown := set(by_type.values) - {FULL, SLIDING}:
        raise CheckpointError(f"rope_parameters has {clipped(sorted(unknown))}: expected {FULL} and {SLIDING}")
    scaling = values.values.get("rope_scaling") if kind == FULL else None
    return Values({**values.values, "rope_scaling": scaling, "rope_parameters": by_type.section(kind).values})
