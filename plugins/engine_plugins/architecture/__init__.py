"""Model families as typed ops."""

from __future__ import annotations

from engine.contracts.provider import Provider
from engine.hookspecs import hookimpl
from engine_plugins.architecture.config import (
    COHERE,
    DEEPSEEK,
    ERNIE,
    EXAONE4,
    GEMMA,
    GEMMA4,
    GLM,
    GLM_MOE,
    GPT_OSS,
    GRANITE,
    HUNYUAN,
    LLAMA4,
    LLAMA_LIKE,
    MINISTRAL,
    MIXTRAL,
    OLMO,
    PHI3,
    QWEN_MOE,
    QWEN_NEXT,
    QWEN_VL,
    SEED_OSS,
    SMOLLM3,
    STARCODER2,
    only,
    only_dense,
)


@hookimpl
def engine_architecture() -> list[Provider]:
    return [
        Provider(
            "llama",
            "engine_plugins.architecture.llama:LlamaArchitecture",
            unsupported=only_dense(*LLAMA_LIKE),
            doc="Llama 2/3, Mistral, Qwen2, Qwen3: dense decoders with RMSNorm, RoPE and a gated MLP.",
        ),
        Provider(
            "llama4",
            "engine_plugins.architecture.llama4:Llama4Architecture",
            unsupported=only(*LLAMA4),
            doc="Llama 4, also as the text model of those that see images: chunked attention, mixtures of experts.",
        ),
        Provider(
            "glm_moe",
            "engine_plugins.architecture.glm_moe:GlmMoeArchitecture",
            unsupported=only(*GLM_MOE),
            doc="GLM-4.5: grouped-query attention, mixtures of experts beside a shared one.",
        ),
        Provider(
            "deepseek",
            "engine_plugins.architecture.deepseek:DeepseekArchitecture",
            unsupported=only(*DEEPSEEK),
            doc="DeepSeek V2 and V3: latent attention, mixtures of experts beside shared ones.",
        ),
        Provider(
            "gpt_oss",
            "engine_plugins.architecture.gpt_oss:GptOssArchitecture",
            unsupported=only(*GPT_OSS),
            doc="gpt-oss: windows, attention sinks, mixtures of experts.",
        ),
        Provider(
            "mixtral",
            "engine_plugins.architecture.experts:MixtralArchitecture",
            unsupported=only(*MIXTRAL),
            doc="Mixtral: Mistral's attention, mixtures of experts.",
        ),
        Provider(
            "qwen_moe",
            "engine_plugins.architecture.experts:QwenMoeArchitecture",
            unsupported=only(*QWEN_MOE),
            doc="Qwen2-MoE, Qwen3-MoE: Qwen's attention, mixtures of experts.",
        ),
        Provider(
            "qwen_next",
            "engine_plugins.architecture.qwen_next:QwenNextArchitecture",
            unsupported=only(*QWEN_NEXT),
            doc="Qwen3-Next, Qwen3.5: gated delta networks, gated attention, experts or none.",
        ),
        Provider(
            "smollm3",
            "engine_plugins.architecture.smollm3:SmolLM3Architecture",
            unsupported=only(*SMOLLM3),
            doc="SmolLM3: Llama with layers that do not rotate.",
        ),
        Provider(
            "seed_oss",
            "engine_plugins.architecture.seed_oss:SeedOssArchitecture",
            unsupported=only(*SEED_OSS),
            doc="Seed-OSS: Llama with biases of queries, keys and values.",
        ),
        Provider(
            "granite",
            "engine_plugins.architecture.granite:GraniteArchitecture",
            unsupported=only(*GRANITE),
            doc="Granite 3: Llama with multipliers of embedding, scores, residual and logits.",
        ),
        Provider(
            "olmo",
            "engine_plugins.architecture.olmo:OlmoArchitecture",
            unsupported=only(*OLMO),
            doc="OLMo 2 and 3: norms after attention and MLP.",
        ),
        Provider(
            "exaone4",
            "engine_plugins.architecture.exaone4:Exaone4Architecture",
            unsupported=only(*EXAONE4),
            doc="EXAONE 4: norms after attention and MLP; layers without a window do not rotate.",
        ),
        Provider(
            "phi3",
            "engine_plugins.architecture.phi3:Phi3Architecture",
            unsupported=only(*PHI3),
            doc="Phi-3, 3.5 and 4: fused projections, partial rotation, longrope.",
        ),
        Provider(
            "starcoder2",
            "engine_plugins.architecture.starcoder2:Starcoder2Architecture",
            unsupported=only(*STARCODER2),
            doc="StarCoder2: LayerNorms, biases, an MLP without a gate.",
        ),
        Provider(
            "cohere",
            "engine_plugins.architecture.cohere:CohereArchitecture",
            unsupported=only(*COHERE),
            doc="Command R, R+, R7B and A: attention and MLP side by side.",
        ),
        Provider(
            "gemma",
            "engine_plugins.architecture.gemma:GemmaArchitecture",
            unsupported=only(*GEMMA),
            doc="Gemma 1, 2 and 3: norms before and after, alternating windows, capped scores or normed heads.",
        ),
        Provider(
            "gemma4",
            "engine_plugins.architecture.gemma4:Gemma4Architecture",
            unsupported=only(*GEMMA4),
            doc="Gemma 4, also as the text model of those that see and hear: inputs of each layer, shared caches.",
        ),
        Provider(
            "glm",
            "engine_plugins.architecture.glm:GlmArchitecture",
            unsupported=only(*GLM),
            doc="GLM-4: half of each head is rotated, by neighbours; gate and up are one projection.",
        ),
        Provider(
            "ministral",
            "engine_plugins.architecture.ministral:MinistralArchitecture",
            unsupported=only(*MINISTRAL),
            doc="Ministral, Ministral 3 and text models of Mistral3: windows, queries that grow with their position.",
        ),
        Provider(
            "qwen_vl",
            "engine_plugins.architecture.qwen_vl:QwenVLArchitecture",
            unsupported=only(*QWEN_VL),
            doc="Text models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.",
        ),
        Provider(
            "hunyuan",
            "engine_plugins.architecture.hunyuan:HunyuanArchitecture",
            unsupported=only(*HUNYUAN),
            doc="Hunyuan (dense): heads are normed after the rotation.",
        ),
        Provider(
            "ernie",
            "engine_plugins.architecture.ernie:ErnieArchitecture",
            unsupported=only(*ERNIE),
            doc="ERNIE 4.5 (dense): neighbours are rotated.",
        ),
    ]
