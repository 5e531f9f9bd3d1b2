"""What the built-in architectures compute (readable without importing one): first entries of ``architectures`` in
``config.json``."""

from __future__ import annotations

DEEPSEEK = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
GPT_OSS = ("GptOssForCausalLM",)
GLM_MOE = ("Glm4MoeForCausalLM",)
MIXTRAL = ("MixtralForCausalLM",)
QWEN_MOE = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of ``config.json`` under which families say how many experts a layer has."""
LLAMA_LIKE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
