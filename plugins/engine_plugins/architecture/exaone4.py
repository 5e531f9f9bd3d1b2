"""EXAONE 4: norms behind attention and MLP instead of before them, and of each query and key head (arXiv 2507.11407).
Where some layers have a window, those without one do not rotate."""

from __future__ import annotations

from engine.checkpoint.sizes import FULL, SLIDING, every_nth_full, layer_types, read_sizes, windows_of
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder
from engine.contracts.model import ModelConfig
from engine_plugins.architecture.blocks import activation, attention, expect_whole_rotation, gated_mlp

DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4}


class Exaone4Architecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        values = Values({**DEFAULTS, **model.raw})
        sizes, act = read_sizes(values, eps=1e-5), activation(values.text("hidden_act", "silu"))
        expect_whole_rotation(sizes)
        types = layer_types(values, sizes.num_layers, lambda: _types(values, sizes.num_layers))
        windows, is_hybrid = windows_of(values, types), values.has("sliding_window")
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i, kind in enumerate(types):
            name = f"model.layers.{i}"
            rope = sizes.rope if kind == SLIDING or not is_hybrid else None
            with b.layer(x):
                a = attention(b, x, f"{name}.self_attn", sizes, rope=rope, window=windows[i], head_norm=True)
                x = b.add(x, b.rms_norm(a, f"{name}.post_attention_layernorm", sizes.eps))
                m = gated_mlp(b, x, f"{name}.mlp", sizes, act)
                x = b.add(x, b.rms_norm(m, f"{name}.post_feedforward_layernorm", sizes.eps))
        b.lm_head(b.rms_norm(x, "model.norm", sizes.eps), "lm_head", sizes.vocab_size, tied=sizes.tied)


def _types(values: Values, layers: int) -> tuple[str, ...]:
    """Where ``layer_types`` does not say."""
    if not values.has("sliding_window"):
        return (FULL,) * layers
    return every_nth_full(layers, values.whole("sliding_window_pattern", "MAX_LAYERS"))
