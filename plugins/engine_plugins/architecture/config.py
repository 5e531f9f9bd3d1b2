"""What the built-in architectures compute (readable without importing one): first entries of ``architectures`` in
``config.json``."""

from __future__ import annotations

GLM_MOE = ("Glm4MoeForCausalLM",)
MIXTRAL = ("MixtralForCausalLM",)
QWEN_MOE = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
LLAMA_LIKE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
SMOLLM3 = ("SmolLM3ForCausalLM",)
SEED_OSS = ("SeedOssForCausalLM",)
GRANITE = ("GraniteForCausalLM",)
OLMO = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
EXAONE4 = ("Exaone4ForCausalLM",)
PHI3 = ("Phi3ForCausalLM",)
STARCODER2 = ("Starcoder2ForCausalLM",)
COHERE = ("CohereForCausalLM", "Cohere2ForCausalLM")
