"""SmolLM3: Llama with layers that do not rotate (arXiv 2501.18795): every fourth one, unless the checkpoint says."""

from __future__ import annotations

from collections.abc import Sequence

from engine.checkpoint.files import CheckpointError
from engine.checkpoint.sizes import FULL, SLIDING, layer_types, read_sizes, windows_of
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder
from engine.contracts.model import ModelConfig
from engine_plugins.architecture.blocks import activation, attention, expect, expect_whole_rotation, gated_mlp

DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2e6,
    "tie_word_embeddings": True,
}


class SmolLM3Architecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        values = Values({**DEFAULTS, **model.raw})
        sizes, act = read_sizes(values), activation(values.text("hidden_act", "silu"))
        expect_whole_rotation(sizes)
        rotated = _rotated(values, sizes.num_layers)
        windows = _windows(values, rotated)
        bias, mlp_bias = values.flag("attention_bias", False), values.flag("mlp_bias", False)
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i in range(sizes.num_layers):
            name = f"model.layers.{i}"
            with b.layer(x):
                h = b.rms_norm(x, f"{name}.input_layernorm", sizes.eps)
                x = b.add(x, attention(
                    b, h, f"{name}.self_attn", sizes, rope=sizes.rope if rotated[i] else None, window=windows[i],
                    bias=bias, out_bias=bias,
                ))  # fmt: skip
                h = b.rms_norm(x, f"{name}.post_attention_layernorm", sizes.eps)
                x = b.add(x, gated_mlp(b, h, f"{name}.mlp", sizes, act, bias=mlp_bias))
        b.lm_head(b.rms_norm(x, "model.norm", sizes.eps), "lm_head", sizes.vocab_size, tied=sizes.tied)


def _rotated(values: Values, layers: int) -> tuple[bool, ...]:
    """Which layers rotate: 1 in ``no_rope_layers``, whatever its name says."""
    if not values.has("no_rope_layers"):
        interval = values.whole("no_rope_layer_interval", "MAX_LAYERS", 4)
        return tuple((i + 1) % interval != 0 for i in range(layers))
    stated = values.wholes("no_rope_layers", "MAX_LAYERS", largest="MAX_SHARE")
    if len(stated) < layers:
        raise CheckpointError(f"no_rope_layers has {len(stated)} entries for {layers} layers")
    return tuple(each == 1 for each in stated[:layers])


def _windows(values: Values, rotated: Sequence[bool]) -> tuple[int | None, ...]:
    """Layers that do not rotate have one, if any has and the checkpoint does not say which."""
    is_used = values.flag("use_sliding_window", False)
    has_any = is_used and values.has("sliding_window")
    types = layer_types(values, len(rotated), lambda: [SLIDING if has_any and not each else FULL for each in rotated])
    if not is_used:
        expect(values, {"layer_types": [FULL] * len(rotated)})
    return windows_of(values, types)
