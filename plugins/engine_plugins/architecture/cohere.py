"""Command R and R+ (Cohere) and Command R7B and A (Cohere 2): attention and MLP side by side behind one LayerNorm,
rotations of neighbours, and scaled logits. Cohere 2 has windows in three layers of four, and rotates in those alone."""

from __future__ import annotations

from dataclasses import replace

from engine.checkpoint.sizes import FULL, DecoderSizes, every_nth_full, layer_types, read_sizes, windows_of
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

DEFAULTS = {"max_position_embeddings": 8192, "tie_word_embeddings": True}
COHERE, COHERE2 = {"rope_theta": 5e5}, {"sliding_window": 4096, "sliding_window_pattern": 4}
EXPECTED = {
    "use_parallel_block": True, "use_gated_activation": True, "position_embedding_type": "rope_gptj", "rotary_pct": 1.0,
    "order_of_interleaved_layers": "local_attn_first",
}  # fmt: skip
"""What checkpoints say beside the keys of transformers."""

Layer = tuple[RopeFacts | None, int | None]
"""Its rotation and its window."""


class CohereArchitecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        is_second = model.architecture == "Cohere2ForCausalLM"
        values = Values({**DEFAULTS, **(COHERE2 if is_second else COHERE), **model.raw})
        expect(values, EXPECTED | ({"use_qk_norm": False} if is_second else {"layer_types": None}))
        sizes = read_sizes(values, eps=1e-5, eps_key="layer_norm_eps")
        expect_whole_rotation(sizes)
        act, bias = activation(values.text("hidden_act", "silu")), values.flag("attention_bias", False)
        norm_heads = values.flag("use_qk_norm", False)
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i, (rope, window) in enumerate(_layers(values, sizes, is_second)):
            name, attn = f"model.layers.{i}", f"model.layers.{i}.self_attn"
            with b.layer(x):
                h = b.layer_norm(x, f"{name}.input_layernorm", sizes.eps)
                q, k, v = qkv_projections(b, h, attn, sizes, bias=bias)
                if norm_heads:
                    q = b.layer_norm(q, f"{attn}.q_norm", sizes.eps, size=sizes.head_dim, by_head=True)
                    k = b.layer_norm(k, f"{attn}.k_norm", sizes.eps, size=sizes.head_dim, by_head=True)
                a = attend(b, q, k, v, attn, sizes, rope=rope, window=window, bias=bias)
                x = b.add(b.add(x, a), gated_mlp(b, h, f"{name}.mlp", sizes, act))
        logits = b.lm_head(b.layer_norm(x, "model.norm", sizes.eps), "lm_head", sizes.vocab_size, tied=sizes.tied)
        b.scale(logits, values.number("logit_scale", "MAX_MULTIPLIER", 0.0625))


def _layers(values: Values, sizes: DecoderSizes, is_second: bool) -> list[Layer]:
    rope, count = replace(sizes.rope, interleaved=True), sizes.num_layers
    if not is_second:
        return [(rope, None)] * count
    types = layer_types(
        values, count, lambda: every_nth_full(count, values.whole("sliding_window_pattern", "MAX_LAYERS"))
    )  # fmt: skip
    ropes = [None if kind == FULL else rope for kind in types]
    return list(zip(ropes, windows_of(values, types), strict=True))
