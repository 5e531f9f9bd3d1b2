"""Families with recurrent layers describe what transformers computes."""

from __future__ import annotations

from typing import Any, ClassVar

from tests.plugins.architecture.family import FULL, Family, written_once  # noqa: F401

from engine_plugins.architecture.qwen_next import LINEAR, QwenNextArchitecture

TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip
EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
}  # fmt: skip
NEXT = TEXT | EXPERTS | {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
DENSE = TEXT | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
SPARSE = TEXT | EXPERTS | {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}


SMALL = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
    "deepstack_visual_indexes": [],
}  # fmt: skip


def seeing(architecture: str, model_type: str, text: dict[str, Any]) -> dict[str, Any]:
    kinds = {"architectures": [architecture], "model_type": model_type}
    return kinds | {"text_config": text, "vision_config": SMALL, "tie_word_embeddings": False}


class TestQwenNext(Family):
    plugin = QwenNextArchitecture
    kernels = ("reference", "torch", "native")
    rounding_error = 0.3  # another expert for a token that is all but undecided
    in_steps = ("qwen3_next", "qwen3_5")
    variants: ClassVar = {
        "qwen3_next": NEXT,
        "qwen3_next with dense layers": NEXT | {
            "mlp_only_layers": [1], "norm_topk_prob": False, "attention_bias": True, "linear_conv_kernel_dim": 2,
            "layer_types": [FULL, LINEAR, LINEAR, FULL], "partial_rotary_factor": 0.5, "tie_word_embeddings": True,
        },
        "qwen3_5": DENSE,
        "qwen3_5_moe": SPARSE,
        "qwen3_5 that sees": seeing("Qwen3_5ForConditionalGeneration", "qwen3_5", DENSE),
        "qwen3_5_moe that sees": seeing("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", SPARSE),
    }  # fmt: skip
