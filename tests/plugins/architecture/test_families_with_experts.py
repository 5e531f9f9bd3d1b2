"""Families with mixtures of experts describe what transformers computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.plugins.architecture.family import FULL, SLIDING, Family, described, written_once  # noqa: F401
from tools.benchmarks.families import PROMPT, difference, logits_of, planned_logits

from engine_plugins.architecture.deepseek import DeepseekArchitecture
from engine_plugins.architecture.experts import MixtralArchitecture, QwenMoeArchitecture
from engine_plugins.architecture.glm_moe import GlmMoeArchitecture
from engine_plugins.architecture.gpt_oss import GptOssArchitecture

YARN = {
    "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def shape(family: str, model_type: str, **options: Any) -> dict[str, Any]:
    return {
        "architectures": [f"{family}ForCausalLM"], "model_type": model_type, "vocab_size": 96, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": None, **options,
    }  # fmt: skip


MIXTRAL = shape("Mixtral", "mixtral", num_local_experts=4, num_experts_per_tok=2)
QWEN2 = shape(
    "Qwen2Moe", "qwen2_moe", moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=6,
    num_experts_per_tok=3,
)  # fmt: skip
QWEN3 = shape("Qwen3Moe", "qwen3_moe", head_dim=8, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=2)
GLM = shape(
    "Glm4Moe", "glm4_moe", head_dim=8, moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3,
    n_shared_experts=1, first_k_dense_replace=1,
)  # fmt: skip
GPT_OSS = shape(
    "GptOss", "gpt_oss", head_dim=8, num_local_experts=5, num_experts_per_tok=2, sliding_window=8,
    layer_types=[SLIDING, FULL, SLIDING], rope_parameters=YARN | {"truncate": False},
)  # fmt: skip
DEEPSEEK = {
    "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
    "first_k_dense_replace": 1,
}  # fmt: skip
DEEPSEEK_V2 = shape("DeepseekV2", "deepseek_v2", **DEEPSEEK, n_shared_experts=2)
DEEPSEEK_V3 = shape("DeepseekV3", "deepseek_v3", **DEEPSEEK, n_shared_experts=1, n_group=4, topk_group=2)


class Mixture(Family):
    rounding_error = 0.3  # another expert for a token that is all but undecided


class TestMixtral(Mixture):
    plugin = MixtralArchitecture
    answers_like = QwenMoeArchitecture
    in_steps = ("mixtral",)
    variants: ClassVar = {
        "mixtral": MIXTRAL,
        "mixtral with a window": MIXTRAL | {"sliding_window": 8, "head_dim": 16, "tie_word_embeddings": True},
    }


def test_mixtral_is_read_by_new_names_of_experts_in_one_tensor_too(tmp_path: Path) -> None:
    with TestMixtral().checkpoint("mixtral") as (written, _, theirs):
        tensors = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
        assert "model.layers.0.mlp.experts.gate_up_proj" in tensors
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes((Path(written.path) / "config.json").read_bytes())
        got, want = (planned_logits(PROMPT, len(PROMPT), f"model.path={path}") for path in (tmp_path, written.path))
        assert torch.equal(got, want)


class TestQwenMoe(Mixture):
    plugin = QwenMoeArchitecture
    in_steps = ("qwen2_moe", "qwen3_moe")
    variants: ClassVar = {
        "qwen2_moe": QWEN2 | {"mlp_only_layers": [1]},
        "qwen2_moe with whole shares": QWEN2 | {"norm_topk_prob": True, "qkv_bias": False},
        "qwen3_moe": QWEN3 | {"norm_topk_prob": True, "decoder_sparse_step": 2},
        "qwen3_moe with biases": QWEN3 | {"norm_topk_prob": False, "attention_bias": True, "mlp_only_layers": [0]},
    }


class TestGlmMoe(Mixture):
    plugin = GlmMoeArchitecture
    answers_like = DeepseekArchitecture
    in_steps = ("glm4_moe",)
    variants: ClassVar = {
        "glm4_moe": GLM | {"use_qk_norm": True, "attention_bias": True},
        "glm4_moe with groups": GLM | {
            "n_shared_experts": 2, "first_k_dense_replace": 0, "n_group": 4, "topk_group": 2,
            "routed_scaling_factor": 1.8, "partial_rotary_factor": 0.25, "head_dim": 16, "norm_topk_prob": False,
        },
    }  # fmt: skip


class TestGptOss(Mixture):
    plugin = GptOssArchitecture
    in_steps = ("gpt_oss",)
    variants: ClassVar = {"gpt_oss": GPT_OSS}


class TestDeepSeek(Mixture):
    plugin = DeepseekArchitecture
    in_steps = ("deepseek_v2", "deepseek_v3")
    variants: ClassVar = {
        "deepseek_v2": DEEPSEEK_V2,
        "deepseek_v2 with groups": DEEPSEEK_V2 | {
            "q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
            "routed_scaling_factor": 2.0,
        },
        "deepseek_v3": DEEPSEEK_V3,
        "deepseek_v3 with scaled positions": DEEPSEEK_V3 | {
            "q_lora_rank": None, "n_group": 1, "topk_group": 1, "attention_bias": True,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    }  # fmt: skip


@pytest.mark.parametrize(("suite", "name", "layer"), [(TestDeepSeek, "deepseek_v3", 61), (TestGlmMoe, "glm4_moe", 46)])
def test_layers_that_predict_further_tokens_are_not_read(
    suite: type[Mixture], name: str, layer: int, tmp_path: Path
) -> None:
    """Where published checkpoints have them, as in transformers, and after the last layer as ``config.json`` says."""
    with suite().checkpoint(name) as (written, _, theirs):
        tensors = load_file(Path(written.path) / "model.safetensors")
        for number in (3, layer):
            tensors |= {f"model.layers.{number}.{of}.weight": torch.full((4, 4), 1.0) for of in ("eh_proj", "enorm")}
        save_file(tensors, tmp_path / "model.safetensors")
        config = json.loads((Path(written.path) / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
        got = planned_logits(PROMPT, len(PROMPT), f"model.path={tmp_path}")
        assert torch.equal(got, planned_logits(PROMPT, len(PROMPT), f"model.path={written.path}"))
        assert difference(got, logits_of(theirs, PROMPT)) <= suite.tolerance


def test_a_layer_is_the_models_own_where_the_model_has_so_many() -> None:
    model = described(DeepseekArchitecture, DEEPSEEK_V3, num_hidden_layers=62, num_nextn_predict_layers=1)
    assert model.ignored == ("model.layers.62.",)
