"""What the built-in architectures compute (readable without importing one): first entries of ``architectures`` in
``config.json``."""

from __future__ import annotations

DEEPSEEK = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
ERNIE = ("Ernie4_5ForCausalLM",)
GEMMA = ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
GLM = ("GlmForCausalLM", "Glm4ForCausalLM")
GPT_OSS = ("GptOssForCausalLM",)
GLM_MOE = ("Glm4MoeForCausalLM",)
HUNYUAN = ("HunYuanDenseV1ForCausalLM",)
MINISTRAL = ("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration")
MIXTRAL = ("MixtralForCausalLM",)
QWEN_MOE = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
QWEN_NEXT = (
    "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)  # fmt: skip
QWEN_VL = (
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of ``config.json`` under which families say how many experts a layer has."""
LLAMA_LIKE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
SMOLLM3 = ("SmolLM3ForCausalLM",)
SEED_OSS = ("SeedOssForCausalLM",)
GRANITE = ("GraniteForCausalLM",)
OLMO = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
EXAONE4 = ("Exaone4ForCausalLM",)
PHI3 = ("Phi3ForCausalLM",)
STARCODER2 = ("Starcoder2ForCausalLM",)
COHERE = ("CohereForCausalLM", "Cohere2ForCausalLM")
