"""What the built-in architectures compute (readable without importing one): first entries of ``architectures`` in
``config.json``."""

from __future__ import annotations

from collections.abc import Callable

from engine.checkpoint.files import clipped
from engine.contracts.model import DeviceFacts, ModelConfig

DEEPSEEK = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
ERNIE = ("Ernie4_5ForCausalLM",)
GEMMA4 = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
GEMMA = ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
GLM = ("GlmForCausalLM", "Glm4ForCausalLM")
GPT_OSS = ("GptOssForCausalLM",)
GLM_MOE = ("Glm4MoeForCausalLM",)
LLAMA4 = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")
HUNYUAN = ("HunYuanDenseV1ForCausalLM",)
MINISTRAL = ("MinistralForCausalLM", "Ministral3ForCausalLM", "Mistral3ForConditionalGeneration")
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


def only(*names: str) -> Callable[[ModelConfig, DeviceFacts], tuple[str, ...]]:
    """The ``unsupported`` of an architecture: it computes checkpoints of these names."""

    def unsupported(model: ModelConfig, device: DeviceFacts) -> tuple[str, ...]:
        return () if model.architecture in names else (f"it computes {', '.join(names)}",)

    return unsupported


def only_dense(*names: str) -> Callable[[ModelConfig, DeviceFacts], tuple[str, ...]]:
    """The same, of an architecture without experts."""
    of_other_names = only(*names)

    def unsupported(model: ModelConfig, device: DeviceFacts) -> tuple[str, ...]:
        said = [f"{key}={clipped(model.raw[key])}" for key in EXPERT_COUNTS if model.raw.get(key)]
        experts = (f"it computes no experts, and config.json says {', '.join(said)}",) if said else ()
        return of_other_names(model, device) or experts

    return unsupported
