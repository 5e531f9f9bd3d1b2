"""gpt-oss (arXiv 2508.10925): windows in every other layer, sinks in every softmax, biases everywhere, and mixtures of
experts whose gates are cut off.
"""

from __future__ import annotations

from engine.checkpoint.sizes import read_sizes, windows_by_layer
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder
from engine.contracts.model import ModelConfig
from engine.contracts.ops import FusedExperts, Gated, LinearPart, Route
from engine_plugins.architecture.blocks import attention, expect, expect_whole_rotation, top_k

YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


class GptOssArchitecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        given = {key: value for key, value in model.raw.items() if value is not None}
        if "rope_parameters" not in given and "rope_scaling" not in given:
            given["rope_parameters"] = YARN
        values = Values({"rope_theta": 150000.0, "head_dim": 64, "sliding_window": 128, **given})
        sizes, bias = read_sizes(values, eps=1e-5), values.flag("attention_bias", True)
        expect(values, {"hidden_act": "silu"})
        expect_whole_rotation(sizes)
        if "layer_types" not in given:
            kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(sizes.num_layers)]
            values = Values({**values.values, "layer_types": kinds})
        count = values.whole("num_local_experts", "MAX_EXPERTS", 128)
        route = Route(count, top_k(values, count, 4), "logits")
        limit = values.number("swiglu_limit", "MAX_ROPE_NUMBER", 7.0)
        gated = Gated("silu", limit, values.number("swiglu_alpha", "MAX_ROPE_NUMBER", 1.702), offset=1.0)
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i, window in enumerate(windows_by_layer(values, sizes.num_layers)):
            name = f"model.layers.{i}"
            with b.layer(x):
                h = b.rms_norm(x, f"{name}.input_layernorm", sizes.eps)
                x = b.add(x, attention(
                    b, h, f"{name}.self_attn", sizes, rope=sizes.rope, window=window, bias=bias, out_bias=bias,
                    sinks=f"{name}.self_attn.sinks",
                ))  # fmt: skip
                h = b.rms_norm(x, f"{name}.post_attention_layernorm", sizes.eps)
                experts, size = f"{name}.mlp.experts", sizes.intermediate_size
                gate, up = (LinearPart(f"{experts}.{{}}.{part}_proj", size, True) for part in ("gate", "up"))
                down = LinearPart(f"{experts}.{{}}.down_proj", sizes.hidden_size, True)
                x = b.add(x, b.experts(
                    h, b.router(h, f"{name}.mlp.router", count, bias=True), route, (gate, up), down, gated,
                    fused=FusedExperts(f"{experts}.gate_up_proj", f"{experts}.down_proj", True, True),
                ))  # fmt: skip
        b.lm_head(b.rms_norm(x, "model.norm", sizes.eps), "lm_head", sizes.vocab_size, tied=sizes.tied)
