"""What the built-in architectures compute (readable without importing one): first entries of ``architectures`` in
``config.json``."""

from __future__ import annotations

ERNIE = ("Ernie4_5ForCausalLM",)
GEMMA = ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
GLM = ("GlmForCausalLM", "Glm4ForCausalLM")
GLM_MOE = ("Glm4MoeForCausalLM",)
HUNYUAN = ("HunYuanDenseV1ForCausalLM",)
MINISTRAL = ("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration")
MIXTRAL = ("MixtralForCausalLM",)
QWEN_MOE = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
QWEN_VL = (
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)
LLAMA_LIKE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
