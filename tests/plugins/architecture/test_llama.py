"""The llama architecture describes what transformers computes; it refuses what it does not know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from engine.contracts.config import SlotConfig
from engine.contracts.model import ModelFacts
from engine.testing.architecture import ArchitectureConformance
from engine.testing.context import build_context
from engine_plugins.architecture.llama import LlamaArchitecture

CONTEXT = build_context()
ARCHITECTURE = LlamaArchitecture(SlotConfig(), CONTEXT)

SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-3, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = SHAPE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MISTRAL = SHAPE | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}
QWEN2 = SHAPE | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = SHAPE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}


class TestLlama(ArchitectureConformance):
    def make(self) -> LlamaArchitecture:
        return LlamaArchitecture(SlotConfig(), CONTEXT)

    def models(self) -> Mapping[str, Mapping[str, Any]]:
        return {
            "llama": LLAMA,
            "llama with biases": LLAMA | {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"},
            "llama tied": LLAMA | {"tie_word_embeddings": True, "head_dim": 24, "num_key_value_heads": 1},
            "mistral": MISTRAL,
            "qwen2": QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "qwen3": QWEN3 | {"tie_word_embeddings": True},
        }

    def reference(self, model: ModelFacts) -> Any:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**model.raw), attn_implementation="eager")


def first_qkv(architecture: str, **raw: bool) -> NormQKVRopeWrite:
    op = ARCHITECTURE.describe(replace(CONTEXT.model, architecture=architecture, raw=raw)).layers[0][0]
    assert isinstance(op, NormQKVRopeWrite)
    return op


def test_qwen2_has_qkv_biases_and_mistral_has_none() -> None:
    assert all(part.bias for part in first_qkv("Qwen2ForCausalLM").qkv.parts)
    assert not any(part.bias for part in first_qkv("MistralForCausalLM").qkv.parts)


def test_only_qwen3_norms_its_heads() -> None:
    assert first_qkv("Qwen3ForCausalLM").q_norm is not None
    assert first_qkv("LlamaForCausalLM").q_norm is None


def test_each_layer_has_its_own_window() -> None:
    model = replace(CONTEXT.model, num_layers=2, layer_windows=(None, 16))
    ops = [op for layer in ARCHITECTURE.describe(model).layers for op in layer if isinstance(op, Attention)]
    assert [op.window for op in ops] == [None, 16]


def test_an_unknown_activation_or_family_is_named() -> None:
    with pytest.raises(ValueError, match="hidden_act 'relu'"):
        ARCHITECTURE.describe(replace(CONTEXT.model, hidden_act="relu"))
    with pytest.raises(ValueError, match="'MambaForCausalLM'"):
        ARCHITECTURE.describe(replace(CONTEXT.model, architecture="MambaForCausalLM"))
