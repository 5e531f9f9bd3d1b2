"""Gemma, GLM-4, Ministral 3, Hunyuan, ERNIE and text models of checkpoints that see images compute what transformers
does; what they do not compute is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from engine.contracts.architecture import Architecture
from engine.contracts.config import SlotConfig
from engine.contracts.model import ModelConfig
from engine.testing.architecture import ArchitectureConformance
from engine_plugins.architecture.ernie import ErnieArchitecture
from engine_plugins.architecture.gemma import GemmaArchitecture
from engine_plugins.architecture.glm import GlmArchitecture
from engine_plugins.architecture.hunyuan import HunyuanArchitecture
from engine_plugins.architecture.ministral import MinistralArchitecture
from engine_plugins.architecture.qwen_vl import QwenVLArchitecture

SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


class FamilySuite(ArchitectureConformance):
    """Models of transformers by their configuration."""

    kernels = ("reference", "torch", "native")

    def reference(self, model: ModelConfig) -> Any:
        config = AutoConfig.for_model(**model.raw)
        auto = AutoModelForImageTextToText if "text_config" in model.raw else AutoModelForCausalLM
        return auto.from_config(config, attn_implementation="eager")


def family(kind: str, name: str, **changes: Any) -> dict[str, Any]:
    return SHAPE | {"model_type": kind, "architectures": [name]} | changes


GEMMA2 = family(
    "gemma2", "Gemma2ForCausalLM", sliding_window=8, query_pre_attn_scalar=24, attn_logit_softcapping=2.0,
    final_logit_softcapping=3.0,
)  # fmt: skip
GEMMA3 = family(
    "gemma3_text", "Gemma3ForCausalLM", sliding_window=8, query_pre_attn_scalar=24, sliding_window_pattern=2
)
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def seeing(kind: str, name: str, text: Mapping[str, Any], vision: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A model with an encoder of images; ``text``: its part for text."""
    parts = {"text_config": dict(text), "vision_config": dict(vision)}
    return {"model_type": kind, "architectures": [name], **parts, **changes}


class TestGemma(FamilySuite):
    def make(self) -> Architecture:
        return GemmaArchitecture(SlotConfig())

    def models(self) -> Mapping[str, Mapping[str, Any]]:
        types = ["full_attention", "sliding_attention", "sliding_attention"]
        llama3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0} | YARN | {"rope_type": "llama3"}
        ropes = {"full_attention": llama3, "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"}}
        return {
            "gemma2": GEMMA2,
            "gemma2 without caps": GEMMA2
            | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True}
            | {"tie_word_embeddings": False, "hidden_activation": "silu", "layer_types": types, "rope_parameters": YARN},
            "gemma3": GEMMA3,
            "gemma3 scaled": GEMMA3
            | {"rope_theta": 5e4, "rope_local_base_freq": 2e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
            | {"final_logit_softcapping": 4.0, "attention_bias": True, "tie_word_embeddings": False},
            "gemma3 by type": GEMMA3 | {"rope_parameters": ropes},
            "gemma3 with images": seeing("gemma3", "Gemma3ForConditionalGeneration", GEMMA3, VISION),
        }
