"""Gemma, GLM-4, Ministral 3, Hunyuan, ERNIE and text models of checkpoints that see images compute what transformers
does; what they do not compute is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from tests.plugins.architecture.family import FULL, SLIDING, Family, written_once  # noqa: F401
from tests.plugins.architecture.family import described as described_by
from transformers import AutoConfig

from engine.contracts.graph import Graph
from engine_plugins.architecture.ernie import ErnieArchitecture
from engine_plugins.architecture.gemma import GemmaArchitecture
from engine_plugins.architecture.glm import GlmArchitecture
from engine_plugins.architecture.hunyuan import HunyuanArchitecture
from engine_plugins.architecture.ministral import MinistralArchitecture
from engine_plugins.architecture.qwen_vl import QwenVLArchitecture

BIASES = {"attention_bias": True}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
VISION: dict[str, dict[str, Any]] = {
    "gemma3": {"image_size": 28, "patch_size": 14},
    "mistral3": {"image_size": 28, "patch_size": 14, "head_dim": 8},
    "qwen2_vl": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
    "qwen2_5_vl": {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "fullatt_block_indexes": [0]},
    "qwen3_vl": {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "deepstack_visual_indexes": [0]},
}
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def model(architecture: str, model_type: str, **options: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **TEXT, **options}


def seeing(architecture: str, model_type: str, text: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """A model with an encoder of images beside ``text``."""
    vision = SMALL | VISION[model_type]
    return {
        "architectures": [architecture], "model_type": model_type, "text_config": dict(text), "vision_config": vision,
        **options,
    }  # fmt: skip


GEMMA2 = model(
    "Gemma2ForCausalLM", "gemma2", sliding_window=8, query_pre_attn_scalar=24, attn_logit_softcapping=2.0,
    final_logit_softcapping=3.0,
)  # fmt: skip
GEMMA3 = model("Gemma3ForCausalLM", "gemma3_text", sliding_window=8, query_pre_attn_scalar=24, sliding_window_pattern=2)
GEMMA3_SEEING = seeing("Gemma3ForConditionalGeneration", "gemma3", GEMMA3)
GLM, GLM4 = model("GlmForCausalLM", "glm"), model("Glm4ForCausalLM", "glm4")
GROWING = YARN | {
    "type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5, "mscale": 1.0,
    "mscale_all_dim": 1.0,
}  # fmt: skip
MINISTRAL3 = model("Ministral3ForCausalLM", "ministral3", rope_parameters=GROWING)
MISTRAL3 = seeing("Mistral3ForConditionalGeneration", "mistral3", TEXT | {"model_type": "mistral", "sliding_window": 8})
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
QWEN3_VL = seeing("Qwen3VLForConditionalGeneration", "qwen3_vl", TEXT | {"rope_parameters": MROPE})
QWEN2_TEXT = {key: value for key, value in TEXT.items() if key != "head_dim"} | {
    "rope_parameters": MROPE | {"mrope_section": [2, 1, 1]}
}
QWEN25_VL = seeing("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", QWEN2_TEXT)
QWEN2_VL = seeing("Qwen2VLForConditionalGeneration", "qwen2_vl", QWEN2_TEXT)
HUNYUAN = model("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense")
ERNIE = model("Ernie4_5ForCausalLM", "ernie4_5")


def with_text(whole: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {**whole, "text_config": {**whole["text_config"], **changes}}


class TestGemma(Family):
    plugin = GemmaArchitecture
    in_steps = ("gemma2", "gemma3 that sees")
    kernels = ("reference", "torch", "native")
    variants: ClassVar = {
        "gemma2": GEMMA2,
        "gemma2 without caps": GEMMA2 | BIASES | {
            "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False,
            "hidden_activation": "silu", "layer_types": [FULL, SLIDING, SLIDING, FULL], "rope_parameters": YARN,
        },
        "gemma3": GEMMA3,
        "gemma3 by old keys": GEMMA3 | BIASES | {
            "rope_theta": 5e4, "rope_local_base_freq": 2e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "final_logit_softcapping": 4.0, "tie_word_embeddings": False,
        },
        "gemma3 by type": GEMMA3 | {
            "rope_parameters": {FULL: LLAMA3, SLIDING: {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}},
        },
        "gemma3 that sees": GEMMA3_SEEING,
        "gemma3 that sees, with a head": GEMMA3_SEEING | {"tie_word_embeddings": False},
    }  # fmt: skip


class TestGlm(Family):
    plugin = GlmArchitecture
    in_steps = ("glm4",)
    kernels = ("reference", "torch", "native")
    variants: ClassVar = {
        "glm": GLM,
        "glm4": GLM4,
        "glm4 rotated whole": GLM4 | {
            "attention_bias": False, "tie_word_embeddings": True, "partial_rotary_factor": 1.0, "hidden_act": "gelu",
        },
        "glm4 stretched": GLM4 | {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}},
    }  # fmt: skip


class TestMinistral(Family):
    plugin = MinistralArchitecture
    in_steps = ("ministral3 that sees",)
    kernels = ("reference", "torch", "native")
    variants: ClassVar = {
        "ministral3": MINISTRAL3,
        "ministral3 with a window": MINISTRAL3 | {"sliding_window": 8, "tie_word_embeddings": True},
        "ministral3 that sees": MISTRAL3 | {"text_config": MINISTRAL3, "tie_word_embeddings": False},
        "mistral that sees": MISTRAL3,
        "mistral that sees, with a head": with_text(MISTRAL3, sliding_window=None)
        | {"tie_word_embeddings": False, "multimodal_projector_bias": True},
    }


class TestQwenVL(Family):
    plugin = QwenVLArchitecture
    in_steps = ("qwen3_vl",)
    kernels = ("reference", "torch", "native")
    variants: ClassVar = {
        "qwen2_vl": QWEN2_VL,
        "qwen2_5_vl": QWEN25_VL,
        "qwen2_5_vl with windows": with_text(QWEN25_VL, use_sliding_window=True, sliding_window=8, max_window_layers=2)
        | {"tie_word_embeddings": True},
        "qwen3_vl": QWEN3_VL,
        "qwen3_vl stretched": with_text(QWEN3_VL, attention_bias=True, rope_parameters=MROPE | YARN)
        | {"tie_word_embeddings": True},
    }


class TestHunyuan(Family):
    plugin = HunyuanArchitecture
    in_steps = ("hunyuan with alpha",)
    kernels = ("reference", "torch", "native")
    variants: ClassVar = {
        "hunyuan": HUNYUAN,
        "hunyuan with alpha": HUNYUAN | BIASES | {
            "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}, "tie_word_embeddings": True,
        },
    }  # fmt: skip


class TestErnie(Family):
    plugin = ErnieArchitecture
    in_steps = ("ernie",)
    kernels = ("reference", "torch", "native")
    variants: ClassVar = {
        "ernie": ERNIE,
        "ernie with biases": ERNIE | {"use_bias": True, "tie_word_embeddings": False},
    }


PLUGINS = {
    family: suite.plugin
    for suite in (TestGemma, TestGlm, TestMinistral, TestQwenVL, TestHunyuan, TestErnie)
    for family in {model["architectures"][0] for model in suite.variants.values()}
}


def described(config: Mapping[str, Any], path: str = "/nowhere", **changes: Any) -> Graph:
    """``changes``: a value of ``...`` is a key less."""
    return described_by(PLUGINS[config["architectures"][0]], config, path, **changes)


PLAIN = (GEMMA2, GEMMA3, GLM, GLM4, MINISTRAL3, HUNYUAN, ERNIE)
NESTED = (GEMMA3_SEEING, MISTRAL3, with_text(MISTRAL3, model_type="ministral3"), QWEN3_VL, QWEN25_VL, QWEN2_VL)


@pytest.mark.parametrize("config", (*PLAIN, *NESTED), ids=lambda config: config["model_type"])
def test_what_the_configuration_leaves_out_is_as_transformers_has_it(config: Mapping[str, Any]) -> None:
    given = {key: config[key] for key in ("architectures", "model_type")}
    few: dict[str, Any] = {"num_hidden_layers": 7}
    if "text_config" in config:
        kind = config["text_config"].get("model_type")
        few = {"text_config": few if kind is None else {"model_type": kind} | few}
    theirs = AutoConfig.for_model(config["model_type"], **few).to_dict()
    assert described(given | few) == described({**theirs, **given})
