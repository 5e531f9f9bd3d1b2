"""StarCoder2 (arXiv 2402.19173): LayerNorms, biases everywhere, and an MLP without a gate."""

from __future__ import annotations

from typing import Any

from engine.checkpoint.sizes import read_sizes, windows_by_layer
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder
from engine.contracts.model import ModelConfig
from engine.contracts.ops import LinearPart
from engine_plugins.architecture.blocks import activation, attention, expect, expect_whole_rotation

DEFAULTS: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
    "num_attention_heads": 24, "num_key_value_heads": 2, "max_position_embeddings": 4096, "norm_epsilon": 1e-5,
}  # fmt: skip
"""What ``config.json`` may leave out."""
EXPECTED = {"norm_type": "layer_norm", "mlp_type": "default", "layer_types": None}


class Starcoder2Architecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        values = Values({**DEFAULTS, **model.raw})
        expect(values, EXPECTED)
        sizes = read_sizes(values, tied=True, eps_key="norm_epsilon")
        expect_whole_rotation(sizes)
        act, bias = activation(values.text("hidden_act", "gelu_pytorch_tanh")), values.flag("use_bias", True)
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i, window in enumerate(windows_by_layer(values, sizes.num_layers, every=True)):
            name = f"model.layers.{i}"
            with b.layer(x):
                h = b.layer_norm(x, f"{name}.input_layernorm", sizes.eps, bias=True)
                x = b.add(x, attention(
                    b, h, f"{name}.self_attn", sizes, rope=sizes.rope, window=window, bias=bias, out_bias=bias
                ))  # fmt: skip
                h = b.layer_norm(x, f"{name}.post_attention_layernorm", sizes.eps, bias=True)
                m = b.linear(h, LinearPart(f"{name}.mlp.c_fc", sizes.intermediate_size, bias), shard="out")
                c_proj = LinearPart(f"{name}.mlp.c_proj", sizes.hidden_size, bias)
                x = b.add(x, b.linear(b.activation(m, act), c_proj, shard="in"))
        h = b.layer_norm(x, "model.norm", sizes.eps, bias=True)
        b.lm_head(h, "lm_head", sizes.vocab_size, tied=sizes.tied)
