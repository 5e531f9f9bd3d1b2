"""Shapes of published models, as their ``config.json`` states them. No weights are needed."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from engine.assembly.model_config import read_config
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Graph
from engine.models.record import recorded

LLAMA, MIXTRAL = ("llama:LlamaArchitecture", "LlamaForCausalLM"), ("experts:MixtralArchitecture", "MixtralForCausalLM")
QWEN, QWEN_MOE = ("llama:LlamaArchitecture", "Qwen3ForCausalLM"), ("experts:QwenMoeArchitecture", "Qwen3MoeForCausalLM")
QWEN2 = ("llama:LlamaArchitecture", "Qwen2ForCausalLM")
GPT_OSS = ("gpt_oss:GptOssArchitecture", "GptOssForCausalLM")


def _shape(
    family: tuple[str, str], layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int,
    vocabulary: int, **more: Any,
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    plugin, architecture = family
    return plugin, {
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **more,
    }


SHAPES = {
    "Llama-3.2-1B": _shape(LLAMA, 16, 2048, 32, 8, 64, 8192, 128256, tie_word_embeddings=True),
    "Llama-3.1-8B": _shape(LLAMA, 32, 4096, 32, 8, 128, 14336, 128256),
    "Llama-3.1-70B": _shape(LLAMA, 80, 8192, 64, 8, 128, 28672, 128256),
    "Qwen3-8B": _shape(QWEN, 36, 4096, 32, 8, 128, 12288, 151936),
    "QwQ-32B": _shape(QWEN2, 64, 5120, 40, 8, 128, 27648, 152064),
    "Mixtral-8x7B": _shape(
        MIXTRAL, 32, 4096, 32, 8, 128, 14336, 32000, num_local_experts=8, num_experts_per_tok=2, sliding_window=None
    ),
    "Qwen3-30B-A3B": _shape(
        QWEN_MOE, 48, 2048, 32, 4, 128, 6144, 151936, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=True,
    ),
    "gpt-oss-120b": _shape(
        GPT_OSS, 36, 2880, 64, 8, 64, 2880, 201088, num_local_experts=128, num_experts_per_tok=4, sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 18,
    ),
}  # fmt: skip


@cache
def graph(name: str) -> Graph:
    """Of a model of :data:`SHAPES`. Raises ``KeyError`` for another."""
    plugin, config = SHAPES[name]
    module, _, kind = plugin.partition(":")
    architecture = getattr(import_module(f"engine_plugins.architecture.{module}"), kind)(SlotConfig())
    return recorded(architecture, read_config(config, {}, f"/shapes/{name}", name))
