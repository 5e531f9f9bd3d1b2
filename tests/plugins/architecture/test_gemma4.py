"""Gemma 4 computes what transformers does; what it does not compute is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from tests.plugins.architecture.family import FULL, SLIDING, Family, written_once  # noqa: F401
from tests.plugins.architecture.family import described as described_by
from tools.benchmarks.families import COMMON, PROMPT, answer, greedy
from transformers import AutoConfig

from engine.assembly.assemble import assemble
from engine.contracts.graph import Graph, KVSpec, Reach
from engine.contracts.ops import Attention, Embed, KVWrite, Linear, Rope
from engine.startup.build import build_engine
from engine_plugins.architecture.gemma4 import Gemma4Architecture

TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "max_position_embeddings": 128,
    "sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING, FULL], "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 16, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GEMMA4 = {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", **TEXT}
SHARED = {"num_hidden_layers": 6, "layer_types": [SLIDING, FULL] * 3, "num_kv_shared_layers": 3}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
SEEING: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
    "text_config": TEXT | SHARED | {"model_type": "gemma4_text", "use_bidirectional_attention": "vision"},
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
        "num_key_value_heads": 2, "patch_size": 4, "position_embedding_size": 16,
    },
    "audio_config": {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [4, 4],
        "output_proj_dims": 16,
    },
}  # fmt: skip


class TestGemma4(Family):
    plugin = Gemma4Architecture
    in_steps = ("gemma4 with shared caches", "gemma4 with experts", "gemma4 that sees and hears")
    kernels = ("reference", "torch", "native")
    rounding_error = 0.3  # another expert for a token that is all but undecided
    variants: ClassVar = {
        "gemma4": GEMMA4 | {"final_logit_softcapping": 10.0, "attention_bias": True},
        "gemma4 with shared caches": GEMMA4 | SHARED | {"use_double_wide_mlp": True},
        "gemma4 with keys as values": GEMMA4 | {
            "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
        },
        "gemma4 with experts": GEMMA4 | EXPERTS | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
        "gemma4 with experts and inputs": GEMMA4 | EXPERTS | {"tie_word_embeddings": False, "hidden_activation": "silu"},
        "gemma4 that sees and hears": SEEING,
    }  # fmt: skip


def described(config: Mapping[str, Any], path: str = "/nowhere", **changes: Any) -> Graph:
    return described_by(Gemma4Architecture, config, path, **changes)


def ops(graph: Graph, kind: type[Any]) -> list[Any]:
    return [node.op for node in graph.nodes if isinstance(node.op, kind)]
