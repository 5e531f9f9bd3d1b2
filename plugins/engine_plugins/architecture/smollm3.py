"""SmolLM3: Llama with layers that do not rotate (arXiv 2501.18795): every fourth one, unless the checkpoint says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.checkpoint.sizes import read_sizes, windows_by_layer
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder
from engine.contracts.model import ModelConfig
from engine_plugins.architecture.blocks import (
    FULL,
    SLIDING,
    activation,
    attention,
    expect,
    expect_whole_rotation,
    gated_mlp,
    rotated_layers,
)

DEFAULTS: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6,
    "no_rope_layer_interval": 4,
}  # fmt: skip
"""What ``config.json`` may leave out."""


class SmolLM3Architecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        values = Values({**DEFAULTS, **model.raw})
        sizes, act = read_sizes(values, tied=True), activation(values.text("hidden_act", "silu"))
        expect_whole_rotation(sizes)
        rotated = rotated_layers(values, sizes.num_layers)
        windows = _windows(values, rotated)
        bias, mlp_bias = values.flag("attention_bias", False), values.flag("mlp_bias", False)
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i, window in enumerate(windows):
            name, rope = f"model.layers.{i}", sizes.rope if rotated[i] else None
            with b.layer(x):
                h = b.rms_norm(x, f"{name}.input_layernorm", sizes.eps)
                x = b.add(x, attention(
                    b, h, f"{name}.self_attn", sizes, rope=rope, window=window, bias=bias, out_bias=bias
                ))  # fmt: skip
                h = b.rms_norm(x, f"{name}.post_attention_layernorm", sizes.eps)
                x = b.add(x, gated_mlp(b, h, f"{name}.mlp", sizes, act, bias=mlp_bias))
        b.lm_head(b.rms_norm(x, "model.norm", sizes.eps), "lm_head", sizes.vocab_size, tied=sizes.tied)


def _windows(values: Values, rotated: Sequence[bool]) -> tuple[int | None, ...]:
    """Layers that do not rotate have one, if any has and the checkpoint does not say which."""
    if not values.flag("use_sliding_window", False):
        expect(values, {"layer_types": [FULL] * len(rotated)})
        return (None,) * len(rotated)
    if not values.has("layer_types") and values.has("sliding_window"):
        values = Values({**values.values, "layer_types": [FULL if each else SLIDING for each in rotated]})
    return windows_by_layer(values, len(rotated))
