"""Dense families beside Llama's describe what transformers computes; they refuse what they do not know."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from engine.assembly.model_config import read_config
from engine.contracts.architecture import Architecture
from engine.contracts.config import SlotConfig
from engine.contracts.model import ModelConfig
from engine.models.record import recorded
from engine.testing.architecture import ArchitectureConformance
from engine_plugins.architecture.cohere import CohereArchitecture
from engine_plugins.architecture.exaone4 import Exaone4Architecture
from engine_plugins.architecture.granite import GraniteArchitecture
from engine_plugins.architecture.olmo import OlmoArchitecture
from engine_plugins.architecture.phi3 import Phi3Architecture
from engine_plugins.architecture.seed_oss import SeedOssArchitecture
from engine_plugins.architecture.smollm3 import SmolLM3Architecture
from engine_plugins.architecture.starcoder2 import Starcoder2Architecture

FULL, SLIDING = "full_attention", "sliding_attention"
BIASES = {"attention_bias": True, "mlp_bias": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def shape(family: str, model_type: str, **options: Any) -> dict[str, Any]:
    return {
        "architectures": [f"{family}ForCausalLM"], "model_type": model_type, "vocab_size": 96, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": None, **options,
    }  # fmt: skip


SMOLLM3 = shape("SmolLM3", "smollm3")
SEED_OSS = shape("SeedOss", "seed_oss", head_dim=8)
GRANITE = shape("Granite", "granite")
OLMO2, OLMO3 = shape("Olmo2", "olmo2"), shape("Olmo3", "olmo3", sliding_window=8)
EXAONE4 = shape("Exaone4", "exaone4", sliding_window=8)
PHI3 = shape("Phi3", "phi3")
STARCODER2 = shape("Starcoder2", "starcoder2")
COHERE, COHERE2 = shape("Cohere", "cohere"), shape("Cohere2", "cohere2", sliding_window=8)


def longrope(pairs: int, kind: str, trained: int, **options: Any) -> dict[str, Any]:
    """``trained``: most tokens with the short factors."""
    short, long = [1.0 + 0.1 * i for i in range(pairs)], [2.0 + i for i in range(pairs)]
    rope = {"type": kind, "rope_type": kind, "short_factor": short, "long_factor": long, **options}
    return {"rope_scaling": rope, "original_max_position_embeddings": trained}


class Family(ArchitectureConformance):
    """Models of transformers are the reference."""

    plugin: ClassVar[type[Any]]
    variants: ClassVar[Mapping[str, Mapping[str, Any]]]

    def make(self) -> Architecture:
        made: Architecture = self.plugin(SlotConfig())
        return made

    def models(self) -> Mapping[str, Mapping[str, Any]]:
        return self.variants

    def reference(self, model: ModelConfig) -> Any:
        config = AutoConfig.for_model(**copy.deepcopy(dict(model.raw)))
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


class TestSmolLM3(Family):
    plugin = SmolLM3Architecture
    variants: ClassVar = {
        "smollm3": SMOLLM3 | {"tie_word_embeddings": True},
        "smollm3 with windows": SMOLLM3 | {"use_sliding_window": True, "sliding_window": 8, "no_rope_layer_interval": 2},
        "smollm3 by layer": SMOLLM3 | BIASES | {
            "use_sliding_window": True, "sliding_window": 8, "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
            "no_rope_layers": [0, 1, 1, 0, 1], "rope_parameters": LLAMA3 | {"rope_theta": 5e6},
        },
    }  # fmt: skip


class TestSeedOss(Family):
    plugin = SeedOssArchitecture
    variants: ClassVar = {
        "seed_oss": SEED_OSS,
        "seed_oss with other biases": SEED_OSS | {
            "attention_bias": False, "attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
            "head_dim": None, "rope_theta": 1e6,
        },
    }  # fmt: skip


class TestGranite(Family):
    plugin = GraniteArchitecture
    variants: ClassVar = {
        "granite": GRANITE,
        "granite with multipliers": GRANITE | {
            "embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.125, "logits_scaling": 8,
            "tie_word_embeddings": True, "rope_theta": 1e6,
        },
        "granite with biases": GRANITE | BIASES | {"hidden_act": "gelu", "attention_multiplier": 0.35},
    }  # fmt: skip


class TestOlmo(Family):
    plugin = OlmoArchitecture
    variants: ClassVar = {
        "olmo2": OLMO2,
        "olmo2 with biases": OLMO2 | {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": None},
        "olmo3": OLMO3 | {"rope_scaling": dict(YARN)},
        "olmo3 by layer": OLMO3 | {
            "layer_types": [FULL, SLIDING, FULL, SLIDING], "attention_bias": True,
            "rope_parameters": {FULL: {**YARN, "rope_theta": 5e5, "attention_factor": 1.2}, SLIDING: {"rope_theta": 1e4}},
        },
        "olmo3 of full layers": OLMO3 | {"layer_types": [FULL] * 4, "sliding_window": None},
    }  # fmt: skip


class TestExaone4(Family):
    plugin = Exaone4Architecture
    variants: ClassVar = {
        "exaone4": EXAONE4,
        "exaone4 with another pattern": EXAONE4 | {"sliding_window_pattern": 2, "tie_word_embeddings": True},
        "exaone4 by layer": EXAONE4 | {
            "sliding_window_pattern": "LG", "layer_types": [SLIDING, FULL, SLIDING, FULL], "head_dim": 16,
            "rope_parameters": LLAMA3 | {"rope_theta": 1e6},
        },
        "exaone4 without windows": EXAONE4 | {"sliding_window": None, "layer_types": [FULL] * 4},
    }  # fmt: skip


class TestPhi3(Family):
    plugin = Phi3Architecture
    variants: ClassVar = {
        "phi3": PHI3 | {"sliding_window": 8},
        "phi4": PHI3 | {"num_attention_heads": 2, "partial_rotary_factor": 0.75, "tie_word_embeddings": True},
        "phi3 up to the trained length": PHI3 | longrope(4, "longrope", trained=128),
        "phi3 beyond the trained length": PHI3 | {"num_attention_heads": 2, "partial_rotary_factor": 0.5}
        | longrope(4, "longrope", trained=4),
        "phi3 with a name of its own": PHI3 | longrope(4, "yarn", trained=4, factor=16.0, attention_factor=1.3),
    }  # fmt: skip


class TestStarcoder2(Family):
    plugin = Starcoder2Architecture
    variants: ClassVar = {
        "starcoder2": STARCODER2 | {"tie_word_embeddings": True},
        "starcoder2 with a window": STARCODER2 | {"use_bias": False, "sliding_window": 8, "hidden_act": "relu"},
    }


class TestCohere(Family):
    plugin = CohereArchitecture
    variants: ClassVar = {
        "cohere": COHERE | {"tie_word_embeddings": True},
        "cohere with head norms": COHERE | {"use_qk_norm": True, "attention_bias": True, "logit_scale": 0.25},
        "cohere2": COHERE2 | {"tie_word_embeddings": True},
        "cohere2 with another pattern": COHERE2 | {"sliding_window_pattern": 2, "logit_scale": 1.5},
        "cohere2 by layer": COHERE2 | {
            "layer_types": [FULL, SLIDING, SLIDING, FULL], "attention_bias": True, "head_dim": 16,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4},
        },
    }  # fmt: skip
