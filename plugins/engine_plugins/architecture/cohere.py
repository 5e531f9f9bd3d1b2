"""Command R and R+ (Cohere) and Command R7B and A (Cohere 2): attention and MLP side by side after one LayerNorm,
rotations of neighbours, and scaled logits. Cohere 2 has windows in three layers of four, and rotates in those alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.checkpoint.sizes import DecoderSizes, read_sizes, windows_by_layer
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder, Value
from engine.contracts.model import ModelConfig
from engine_plugins.architecture.blocks import (
    activation,
    expect,
    expect_whole_rotation,
    gated_mlp,
    no_windows,
    o_proj,
    qkv_proj,
    with_layer_types,
)

COMMON: dict[str, Any] = {
    "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
    "num_attention_heads": 64, "max_position_embeddings": 8192, "layer_norm_eps": 1e-5,
}  # fmt: skip
COHERE = COMMON | {"rope_theta": 5e5}
COHERE2 = COMMON | {"sliding_window": 4096, "sliding_window_pattern": 4}
"""What ``config.json`` may leave out."""
EXPECTED: dict[str, Any] = {
    "use_parallel_block": True, "use_gated_activation": True, "position_embedding_type": "rope_gptj", "rotary_pct": 1.0,
    "order_of_interleaved_layers": "local_attn_first",
}  # fmt: skip
"""What some checkpoints say of what all have."""


class CohereArchitecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        is_second = model.architecture == "Cohere2ForCausalLM"
        values = with_layer_types(Values({**COHERE2, **model.raw})) if is_second else Values({**COHERE, **model.raw})
        expect(values, EXPECTED | ({"use_qk_norm": False} if is_second else {}))
        sizes = read_sizes(values, tied=True, eps_key="layer_norm_eps")
        expect_whole_rotation(sizes)
        windows = (windows_by_layer if is_second else no_windows)(values, sizes.num_layers)
        act, bias = activation(values.text("hidden_act", "silu")), values.flag("attention_bias", False)
        norm_heads = values.flag("use_qk_norm", False)
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i, window in enumerate(windows):
            name = f"model.layers.{i}"
            with b.layer(x):
                h = b.layer_norm(x, f"{name}.input_layernorm", sizes.eps)
                q, k, v = qkv_proj(b, h, f"{name}.self_attn", sizes, bias=bias)
                if norm_heads:
                    q, k = (_norm(b, each, f"{name}.self_attn.{of}_norm", sizes) for each, of in ((q, "q"), (k, "k")))
                if window is not None or not is_second:
                    q, k = b.rope(q, k, replace(sizes.rope, interleaved=True), sizes.head_dim)
                a = b.attention(q, k, v, sizes.head_dim, window=window)
                x = b.add(x, o_proj(b, a, f"{name}.self_attn", sizes, bias=bias))
                x = b.add(x, gated_mlp(b, h, f"{name}.mlp", sizes, act))
        logits = b.lm_head(b.layer_norm(x, "model.norm", sizes.eps), "lm_head", sizes.vocab_size, tied=sizes.tied)
        b.scale(logits, values.number("logit_scale", "MAX_MULTIPLIER", 0.0625))


def _norm(b: Builder, heads: Value, name: str, sizes: DecoderSizes) -> Value:
    return b.layer_norm(heads, name, sizes.eps, size=sizes.head_dim, by_head=True)
