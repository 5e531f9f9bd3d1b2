"""The built-in plugins, offered through the same entry point as everyone else's.

Metadata only: nothing here imports torch, and a factory's module is imported only when its plugin is selected.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from engine.checkpoint.files import clipped, shown
from engine.contracts.command import CommandProvider
from engine.contracts.model import DeviceFacts, ModelConfig, ModelFacts
from engine.contracts.provider import Provider
from engine.hookspecs import hookimpl
from engine_plugins.architecture.config import (
    COHERE,
    DEEPSEEK,
    ERNIE,
    EXAONE4,
    EXPERT_COUNTS,
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
)
from engine_plugins.attention_kernel.config import TRITON_CAPABILITY, beyond_triton_heads
from engine_plugins.drafter.config import (
    DraftModelConfig,
    Eagle3Config,
    EarlyExitConfig,
    NgramConfig,
    NoDrafterConfig,
    ParallelBlockConfig,
    SuffixConfig,
)
from engine_plugins.exporter.config import (
    ConsoleConfig,
    JsonlConfig,
    OtlpConfig,
    PrometheusConfig,
    TraceConfig,
    WebhookConfig,
)
from engine_plugins.parallelism.env import EnvConfig
from engine_plugins.parallelism.join import JoinConfig
from engine_plugins.parallelism.ray.config import RayConfig, needs_ray
from engine_plugins.quantizer.checkpoint.config import CheckpointConfig
from engine_plugins.quantizer.checkpoint.methods import unreadable
from engine_plugins.quantizer.config import FP8Config, Int4Config, Int8Config, UnquantizedConfig
from engine_plugins.router.config import ResponseCacheConfig
from engine_plugins.scheduler.config import ChunkedPrefillConfig


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


def only_plain_checkpoints(model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
    if model.quantization is None:
        return ()
    method = shown(model.quantization.get("quant_method", "unknown"))
    return (f"the checkpoint is already quantized (quant_method={method}); quantizer=checkpoint reads that",)


def beyond_triton(model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
    reasons = []
    # Triton itself reads this variable when a kernel is defined, so it cannot come from the configuration.
    if os.environ.get("TRITON_INTERPRET") != "1":
        if device.kind != "cuda":
            reasons.append("needs a CUDA device")
        elif device.capability is not None and device.capability < TRITON_CAPABILITY:
            has, needs = (".".join(map(str, version)) for version in (device.capability, TRITON_CAPABILITY))
            reasons.append(f"needs compute capability {needs}, this device has {has}")
    reasons.extend(beyond_triton_heads(model.attentions))
    return tuple(reasons)


def only_compiling_cpus(model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
    if device.kind != "cpu":
        return (f"its kernels are for CPUs, not {device.kind}",)
    if "cxx" not in device.features:
        return (f"it needs a C++ compiler: {device.no_cxx}",)
    return ()


def only_cpus(model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
    return () if device.kind == "cpu" else (f"it moves tensors of CPUs, not {device.kind}",)


def only_gpus(model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
    return () if device.kind == "cuda" else (f"it moves tensors of GPUs, not {device.kind}",)


@hookimpl
def engine_scheduler() -> list[Provider]:
    return [
        Provider(
            "static",
            "engine_plugins.scheduler.static:StaticScheduler",
            doc="Request-level batches: a batch runs to its end before the next one starts.",
        ),
        Provider(
            "continuous",
            "engine_plugins.scheduler.continuous:ContinuousScheduler",
            doc="Requests join and leave at every step; prompts run whole.",
        ),
        Provider(
            "chunked_prefill",
            "engine_plugins.scheduler.chunked_prefill:ChunkedPrefillScheduler",
            config=ChunkedPrefillConfig,
            doc="Decodes first; prompts run in chunks that fit the token and time budget.",
        ),
    ]


@hookimpl
def engine_kv_allocator() -> list[Provider]:
    return [
        Provider(
            "contiguous",
            "engine_plugins.kv_allocator.contiguous:ContiguousAllocator",
            doc="Reserves a request's full length when it starts.",
        ),
        Provider(
            "paged",
            "engine_plugins.kv_allocator.paged:PagedAllocator",
            provides=("paged",),
            doc="Takes blocks as a request grows.",
        ),
        Provider(
            "prefix_cache",
            "engine_plugins.kv_allocator.prefix_cache:PrefixCacheAllocator",
            provides=("paged", "prefix_cache"),
            doc="Paged, and finished blocks stay reusable by later prompts with the same beginning (LRU).",
        ),
    ]


@hookimpl
def engine_kv_format() -> list[Provider]:
    return [
        Provider(
            "native",
            "engine_plugins.kv_format.native:NativeFormat",
            provides=("lossless",),
            doc="Keys and values in the compute dtype.",
        ),
        Provider(
            "fp8",
            "engine_plugins.kv_format.fp8:FP8Format",
            doc="Keys and values in float8 (e4m3), scaled as the checkpoint says.",
        ),
        Provider(
            "int8",
            "engine_plugins.kv_format.int8:Int8Format",
            doc="Keys and values in 8 bits, one scale per token and head.",
        ),
    ]


@hookimpl
def engine_quantizer() -> list[Provider]:
    return [
        Provider(
            "checkpoint",
            "engine_plugins.quantizer.checkpoint.quantizer:FromCheckpoint",
            config=CheckpointConfig,
            unsupported=unreadable,
            sources="engine_plugins.quantizer.sources:of_checkpoint",
            doc="As the checkpoint says (compressed-tensors, FP8, MXFP4, ModelOpt, AWQ, GPTQ); unquantized if silent.",
        ),
        Provider(
            "none",
            "engine_plugins.quantizer.unquantized:Unquantized",
            config=UnquantizedConfig,
            provides=("lossless",),
            unsupported=only_plain_checkpoints,
            sources="engine_plugins.quantizer.sources:of_plain",
            doc="Weights in the compute dtype.",
        ),
        Provider(
            "int8",
            "engine_plugins.quantizer.on_load:Int8",
            config=Int8Config,
            unsupported=only_plain_checkpoints,
            sources="engine_plugins.quantizer.sources:of_rounded",
            doc="Weights in 8 bits with one scale per output channel, rounded while loading.",
        ),
        Provider(
            "int4",
            "engine_plugins.quantizer.on_load:Int4",
            config=Int4Config,
            unsupported=only_plain_checkpoints,
            sources="engine_plugins.quantizer.sources:of_rounded",
            doc="Weights in 4 bits with a scale per group of inputs, rounded while loading.",
        ),
        Provider(
            "fp8",
            "engine_plugins.quantizer.on_load:FP8",
            config=FP8Config,
            unsupported=only_plain_checkpoints,
            sources="engine_plugins.quantizer.sources:of_rounded",
            doc="Weights in float8 (e4m3) with one scale per output channel, rounded while loading.",
        ),
    ]


@hookimpl
def engine_drafter() -> list[Provider]:
    return [
        Provider(
            "none",
            "engine_plugins.drafter.none:NoDrafter",
            config=NoDrafterConfig,
            doc="No speculation.",
        ),
        Provider(
            "ngram",
            "engine_plugins.drafter.ngram:NgramDrafter",
            config=NgramConfig,
            provides=("drafts", "host_drafter"),
            doc="Prompt lookup: continues as the same words continued earlier in the request.",
        ),
        Provider(
            "suffix",
            "engine_plugins.drafter.suffix:SuffixDrafter",
            config=SuffixConfig,
            provides=("drafts", "host_drafter"),
            doc="Continues as the same words continued in the request or in other requests' latest outputs.",
        ),
        Provider(
            "draft_model",
            "engine_plugins.drafter.draft_model:DraftModelDrafter",
            config=DraftModelConfig,
            provides=("drafts",),
            sources="engine.sampling.sources:drafting_sources",
            doc="A smaller model of the same family drafts.",
        ),
        Provider(
            "eagle3",
            "engine_plugins.drafter.eagle3.drafter:Eagle3Drafter",
            config=Eagle3Config,
            provides=("drafts",),
            sources="engine.sampling.sources:drafting_sources",
            doc="A small head on the model's hidden states drafts.",
        ),
        Provider(
            "parallel_block",
            "engine_plugins.drafter.parallel_block:ParallelBlockDrafter",
            config=ParallelBlockConfig,
            provides=("drafts",),
            doc="A small head fills a whole block of drafts in one pass.",
        ),
        Provider(
            "early_exit",
            "engine_plugins.drafter.early_exit:EarlyExitDrafter",
            config=EarlyExitConfig,
            provides=("drafts",),
            sources="engine.sampling.sources:drafting_sources",
            doc="The model's own first layers draft.",
        ),
    ]


@hookimpl
def engine_attention_kernel() -> list[Provider]:
    return [
        Provider(
            "torch",
            "engine_plugins.attention_kernel.torch_paged:TorchAttention",
            provides=("log_sum_exp",),
            doc="Plain torch on any device; the reference.",
        ),
        Provider(
            "cpu",
            "engine_plugins.attention_kernel.cpu.kernel:CpuAttention",
            provides=("log_sum_exp",),
            unsupported=only_compiling_cpus,
            sources="engine_plugins.attention_kernel.cpu.sources:sources",
            doc="C++ kernels for CPUs, with AMX where there is; built at start-up.",
        ),
        Provider(
            "triton",
            "engine_plugins.attention_kernel.triton.kernel:TritonAttention",
            provides=("capturable", "log_sum_exp"),
            unsupported=beyond_triton,
            doc="Triton kernels for prefill, decode and verification.",
        ),
    ]


@hookimpl
def engine_router() -> list[Provider]:
    return [
        Provider("direct", "engine_plugins.router.direct:DirectRouter", doc="Every request to the engine."),
        Provider(
            "response_cache",
            "engine_plugins.router.response_cache:ResponseCacheRouter",
            config=ResponseCacheConfig,
            doc="Answers repeated deterministic requests from memory.",
        ),
    ]


@hookimpl
def engine_exporter() -> list[Provider]:
    return [
        Provider(
            "prometheus",
            "engine_plugins.exporter.prometheus:PrometheusExporter",
            config=PrometheusConfig,
            doc="Metrics at /metrics.",
        ),
        Provider(
            "jsonl",
            "engine_plugins.exporter.jsonl:JsonlExporter",
            config=JsonlConfig,
            doc="Events as lines of JSON in a file.",
        ),
        Provider(
            "trace",
            "engine_plugins.exporter.trace:TraceExporter",
            config=TraceConfig,
            doc="Requests as a trace for engine simulate: lengths and salted hashes, no texts.",
        ),
        Provider(
            "console",
            "engine_plugins.exporter.console:ConsoleExporter",
            config=ConsoleConfig,
            doc="A summary line every few seconds.",
        ),
        Provider(
            "otlp",
            "engine_plugins.exporter.otlp:OtlpExporter",
            config=OtlpConfig,
            doc="Spans of requests and their phases to an OpenTelemetry collector.",
        ),
        Provider(
            "webhook",
            "engine_plugins.exporter.webhook:WebhookExporter",
            config=WebhookConfig,
            doc="Alerts of the engine's own rules to a URL, as Alertmanager posts them.",
        ),
    ]


@hookimpl
def engine_parallelism() -> list[Provider]:
    return [
        Provider(
            "local",
            "engine_plugins.parallelism.local:LocalLauncher",
            doc="All ranks on this machine, a process each; nothing is started for one rank.",
        ),
        Provider(
            "join",
            "engine_plugins.parallelism.join:JoinLauncher",
            config=JoinConfig,
            doc="Workers are started by hand, here or elsewhere: engine worker --join HOST:PORT.",
        ),
        Provider(
            "env",
            "engine_plugins.parallelism.env:EnvLauncher",
            config=EnvConfig,
            doc="Every rank is started with the same command, by torchrun, Slurm or MPI.",
        ),
        Provider(
            "ray",
            "engine_plugins.parallelism.ray.launcher:RayLauncher",
            config=RayConfig,
            unsupported=needs_ray,
            doc="Workers on the machines of a Ray cluster, which are found and started by Ray.",
        ),
        Provider(
            "threads",
            "engine_plugins.parallelism.threads:ThreadLauncher",
            provides=("one_process",),
            doc="All ranks in one process, a thread each: for tests.",
        ),
    ]


@hookimpl
def engine_communicator() -> list[Provider]:
    return [
        Provider(
            "nccl",
            "engine_plugins.communicator.nccl:NcclCommunicator",
            provides=("capturable", "several_machines"),
            unsupported=only_gpus,
            doc="A GPU for each rank, by NCCL.",
        ),
        Provider(
            "shm",
            "engine_plugins.communicator.shm.communicator:SharedMemoryCommunicator",
            unsupported=only_compiling_cpus,
            doc="Ranks on one machine's CPUs, through memory that they share.",
        ),
        Provider(
            "gloo",
            "engine_plugins.communicator.gloo:GlooCommunicator",
            provides=("several_machines",),
            unsupported=only_cpus,
            doc="Ranks on CPUs of any machines, over TCP.",
        ),
        Provider(
            "simulated",
            "engine_plugins.communicator.simulated:SimulatedCommunicator",
            requires={"parallelism": ("one_process",)},
            doc="All ranks in one process, a thread each: what every other one must equal.",
        ),
    ]


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
            doc="OLMo 2 and 3: norms behind attention and MLP.",
        ),
        Provider(
            "exaone4",
            "engine_plugins.architecture.exaone4:Exaone4Architecture",
            unsupported=only(*EXAONE4),
            doc="EXAONE 4: norms behind attention and MLP; layers without a window do not rotate.",
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
            doc="Gemma 1, 2 and 3: norms before and behind, alternating windows, capped scores or normed heads.",
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
            doc="Hunyuan (dense): heads are normed behind the rotation.",
        ),
        Provider(
            "ernie",
            "engine_plugins.architecture.ernie:ErnieArchitecture",
            unsupported=only(*ERNIE),
            doc="ERNIE 4.5 (dense): neighbours are rotated.",
        ),
    ]


@hookimpl
def engine_command() -> list[CommandProvider]:
    return [
        CommandProvider(
            "alerts",
            "engine_plugins.command.alerts.command:COMMAND",
            "say what is wrong with a running engine; the rules for Prometheus",
        ),
        CommandProvider(
            "bench",
            "engine_plugins.command.bench.command:COMMAND",
            "measure TTFT, ITL and throughput of a running server",
        ),
        CommandProvider(
            "plan",
            "engine_plugins.command.plan.command:COMMAND",
            "does a model fit a device, how fast, at what price, what to change",
        ),
        CommandProvider(
            "bench-machine",
            "engine_plugins.command.bench_machine.command:COMMAND",
            "measure how fast this machine reads memory and multiplies",
        ),
        CommandProvider(
            "eval",
            "engine_plugins.command.eval.command:COMMAND",
            "measure what a plan costs in quality and what fits in memory",
        ),
        CommandProvider(
            "top",
            "engine_plugins.command.top.command:COMMAND",
            "watch a running engine: rates, percentiles, batch, KV, its slowest requests",
        ),
        CommandProvider(
            "chat",
            "engine_plugins.command.chat.command:COMMAND",
            "chat in the terminal, with the speed of each answer",
        ),
        CommandProvider(
            "dashboards",
            "engine_plugins.command.dashboards.command:COMMAND",
            "write Grafana dashboards of an engine's metrics",
        ),
        CommandProvider(
            "simulate",
            "engine_plugins.command.simulate.command:COMMAND",
            "simulate an engine under the load of a trace",
        ),
        CommandProvider(
            "ladder",
            "engine_plugins.command.ladder.command:COMMAND",
            "measure what each optimisation changes, one by one",
        ),
        CommandProvider(
            "doctor",
            "engine_plugins.command.doctor.command:COMMAND",
            "say why a running engine is slow, what to change, and what that should bring",
            finds_with=("--json", "--window", "5"),
        ),
    ]
