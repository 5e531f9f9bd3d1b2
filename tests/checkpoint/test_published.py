"""Limits are beyond what is published: the configurations of large models are read as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.families import model_facts, model_graph

from engine.contracts.ops import Rope

LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248,
    "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "tie_word_embeddings": False,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 8192, "intermediate_size": 29568,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 152064,
    "max_position_embeddings": 32768, "max_window_layers": 80, "sliding_window": 131072, "use_sliding_window": False,
    "rope_theta": 1000000.0, "rms_norm_eps": 1e-06, "torch_dtype": "bfloat16", "bos_token_id": 151643,
    "eos_token_id": 151645, "tie_word_embeddings": False, "head_dim": None,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
}  # fmt: skip
LONG = LLAMA_405B | {"rope_scaling": None, "rope_theta": 3580165449.0, "max_position_embeddings": 1048576}
LATENT = LLAMA_405B | {
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn",
        "original_max_position_embeddings": 4096,
    },
    "n_routed_experts": 256, "num_experts_per_tok": 8, "vocab_size": 129280,
}  # fmt: skip
UNUSUAL = LLAMA_405B | {"time_step_limit": (0.0, float("inf")), "model_max_length": 10**30, "quantization_config": None}


@pytest.mark.parametrize("config", [LLAMA_405B, QWEN, LONG, LATENT, UNUSUAL])
def test_a_large_model_is_within_every_limit(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts, graph = model_facts(str(tmp_path)), model_graph(str(tmp_path))
    assert facts.num_layers == config["num_hidden_layers"] and facts.max_position >= config["max_position_embeddings"]
    assert {node.op.facts.theta for node in graph.nodes if isinstance(node.op, Rope)} == {config["rope_theta"]}
