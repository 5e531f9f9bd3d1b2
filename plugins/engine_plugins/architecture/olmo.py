"""OLMo 2 and 3: norms behind attention and MLP instead of before them, and one over all queries and one over all keys
(arXiv 2501.00656). OLMo 3 has windows in three layers of four, and a rotation for each type of layers."""

from __future__ import annotations

from engine.checkpoint.files import CheckpointError, clipped
from engine.checkpoint.sizes import (
    FULL,
    SLIDING,
    DecoderSizes,
    every_nth_full,
    layer_types,
    read_sizes,
    windows_of,
)
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder
from engine.contracts.model import ModelConfig
from engine.contracts.ops import RopeFacts
from engine_plugins.architecture.blocks import (
    activation,
    attend,
    expect,
    expect_whole_rotation,
    gated_mlp,
    qkv_projections,
)

EPS = 1e-5
OLMO3_DEFAULTS = {"sliding_window": 4096, "rope_theta": 5e5}

Layer = tuple[RopeFacts, int | None]
"""Its rotation and its window."""


class OlmoArchitecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        values = Values(model.raw)
        sizes, layers = _olmo3(values) if model.architecture == "Olmo3ForCausalLM" else _olmo2(values)
        act, bias = activation(values.text("hidden_act", "silu")), values.flag("attention_bias", False)
        expect(values, {"clip_qkv": None})
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i, (rope, window) in enumerate(layers):
            name = f"model.layers.{i}"
            with b.layer(x):
                q, k, v = qkv_projections(b, x, f"{name}.self_attn", sizes, bias=bias)
                q = b.rms_norm(q, f"{name}.self_attn.q_norm", sizes.eps)
                k = b.rms_norm(k, f"{name}.self_attn.k_norm", sizes.eps)
                a = attend(b, q, k, v, f"{name}.self_attn", sizes, rope=rope, window=window, bias=bias)
                x = b.add(x, b.rms_norm(a, f"{name}.post_attention_layernorm", sizes.eps))
                m = gated_mlp(b, x, f"{name}.mlp", sizes, act)
                x = b.add(x, b.rms_norm(m, f"{name}.post_feedforward_layernorm", sizes.eps))
        b.lm_head(b.rms_norm(x, "model.norm", sizes.eps), "lm_head", sizes.vocab_size, tied=sizes.tied)


def _olmo2(values: Values) -> tuple[DecoderSizes, list[Layer]]:
    sizes = read_sizes(values, eps=EPS)
    expect_whole_rotation(sizes)
    return sizes, [(sizes.rope, None)] * sizes.num_layers


def _olmo3(values: Values) -> tuple[DecoderSizes, list[Layer]]:
    values = Values({**OLMO3_DEFAULTS, **values.values})
    # transformers rotates layers with a window by this one, whatever is stated beside rope_parameters.
    expect(values, {"rope_theta": OLMO3_DEFAULTS["rope_theta"]})
    full, sliding = (read_sizes(_of_type(values, kind), eps=EPS) for kind in (FULL, SLIDING))
    expect_whole_rotation(full)
    expect_whole_rotation(sliding)
    types = layer_types(values, full.num_layers, lambda: every_nth_full(full.num_layers, 4))
    ropes = [full.rope if kind == FULL else sliding.rope for kind in types]
    return full, list(zip(ropes, windows_of(values, types), strict=True))


def _of_type(values: Values, kind: str) -> Values:
    """``values`` with the rotation of one type of layers: ``rope_scaling`` is that of those without a window."""
    by_type = values.section("rope_parameters")
    if unknown := set(by_type.values) - {FULL, SLIDING}:
        raise CheckpointError(f"rope_parameters has {clipped(sorted(unknown))}: expected {FULL} and {SLIDING}")
    scaling = values.values.get("rope_scaling") if kind == FULL else None
    return Values({**values.values, "rope_scaling": scaling, "rope_parameters": by_type.section(kind).values})
