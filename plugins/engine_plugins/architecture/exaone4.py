"""EXAONE 4: norms after attention and MLP instead of before them, and of each query and key head (arXiv 2507.11407).
Where some layers have a window, those without one do not rotate."""

from __future__ import annotations

from typing import Any

from engine.checkpoint.sizes import read_sizes, windows_by_layer
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder
from engine.contracts.model import ModelConfig
from engine_plugins.architecture.blocks import (
    activation,
    attention,
    expect_whole_rotation,
    gated_mlp,
    with_layer_types,
)

DEFAULTS: dict[str, Any] = {
    "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "sliding_window": 4096, "sliding_window_pattern": 4,
}  # fmt: skip
"""What ``config.json`` may leave out."""


class Exaone4Architecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        values = Values({**DEFAULTS, **model.raw})
        sizes, act = read_sizes(values), activation(values.text("hidden_act", "silu"))
        expect_whole_rotation(sizes)
        is_hybrid = values.has("sliding_window")
        windows = windows_by_layer(with_layer_types(values) if is_hybrid else values, sizes.num_layers)
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i, window in enumerate(windows):
            name, rope = f"model.layers.{i}", None if is_hybrid and window is None else sizes.rope
            with b.layer(x):
                a = attention(b, x, f"{name}.self_attn", sizes, rope=rope, window=window, head_norm=True)
                x = b.add(x, b.rms_norm(a, f"{name}.post_attention_layernorm", sizes.eps))
                m = gated_mlp(b, x, f"{name}.mlp", sizes, act)
                x = b.add(x, b.rms_norm(m, f"{name}.post_feedforward_layernorm", sizes.eps))
        b.lm_head(b.rms_norm(x, "model.norm", sizes.eps), "lm_head", sizes.vocab_size, tied=sizes.tied)
