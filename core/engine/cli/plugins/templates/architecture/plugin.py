"""Architecture ``mine``: a decoder in the manner of Llama, written down as typed operations."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.config import SlotConfig
from engine.contracts.model import DeviceFacts, ModelFacts
from engine.contracts.ops import (
    Attention,
    DownResidual,
    Embed,
    LayerOp,
    LinearPart,
    LinearSpec,
    LMHead,
    ModelOps,
    NormGateUpAct,
    NormQKVRopeWrite,
    NormSpec,
    OutResidual,
)
from engine.contracts.provider import BuildContext, Provider
from engine.hookspecs import hookimpl

FAMILIES = ("MineForCausalLM", "LlamaForCausalLM")
"""First entry of ``architectures`` in ``config.json``. The second is there so that the bundled model can be served."""


@dataclass(frozen=True)
class MineArchitectureConfig(SlotConfig):
    """The keys ``architecture.<field>``: add fields with a type, a default and a line on what they do."""


def only_this_family(model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
    """Why the plugin cannot compute this checkpoint; empty: it can. ``model.raw`` is the whole ``config.json``."""
    if model.architecture not in FAMILIES:
        return (f"it computes {', '.join(FAMILIES)}, not {model.architecture}",)
    biased = [key for key in ("attention_bias", "mlp_bias") if model.raw.get(key)]
    if biased:
        return (f"it has no biases, the checkpoint says {', '.join(biased)}",)
    if model.hidden_act != "silu":
        return (f"it has the activation silu, not hidden_act={model.hidden_act}",)
    return ()


@hookimpl
def engine_architecture() -> list[Provider]:
    return [
        Provider(
            "mine",
            "engine.cli.plugins.templates.architecture.plugin:MineArchitecture",
            config=MineArchitectureConfig,
            unsupported=only_this_family,
            doc="A dense decoder with RMSNorm, RoPE and a gated MLP.",
        )
    ]


class MineArchitecture:
    """It never touches a tensor: it says what is computed, and how the checkpoint's tensors are named."""

    def __init__(self, config: MineArchitectureConfig, context: BuildContext) -> None:
        pass

    def describe(self, model: ModelFacts) -> ModelOps:
        """Embedding, each layer's operations in order, and the head. Names are those of the checkpoint."""
        head = LinearSpec((LinearPart("lm_head", model.vocab_size),), model.hidden_size, shard="out", kind="head")
        return ModelOps(
            embed=Embed("model.embed_tokens", model.vocab_size, model.hidden_size),
            layers=tuple(_layer(model, index) for index in range(model.num_layers)),
            head=LMHead(NormSpec("model.norm", model.rms_norm_eps), head, tied=model.tie_embeddings),
        )


def _layer(model: ModelFacts, index: int) -> tuple[LayerOp, ...]:
    prefix = f"model.layers.{index}"
    return (*_attention(model, prefix, index), *_mlp(model, prefix))


def _attention(model: ModelFacts, prefix: str, index: int) -> tuple[LayerOp, ...]:
    name, dim = f"{prefix}.self_attn", model.head_dim
    q_size, kv_size = model.num_heads * dim, model.num_kv_heads * dim
    parts = tuple(LinearPart(f"{name}.{p}_proj", size) for p, size in (("q", q_size), ("k", kv_size), ("v", kv_size)))
    return (
        NormQKVRopeWrite(
            norm=NormSpec(f"{prefix}.input_layernorm", model.rms_norm_eps),
            qkv=LinearSpec(parts, model.hidden_size, shard="out"),
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=dim,
            rope=model.rope,
        ),
        Attention(model.num_heads, model.num_kv_heads, dim, scale=dim**-0.5, window=model.layer_windows[index]),
        OutResidual(LinearSpec((LinearPart(f"{name}.o_proj", model.hidden_size),), q_size, shard="in")),
    )


def _mlp(model: ModelFacts, prefix: str) -> tuple[LayerOp, ...]:
    name, size = f"{prefix}.mlp", model.intermediate_size
    parts = (LinearPart(f"{name}.gate_proj", size), LinearPart(f"{name}.up_proj", size))
    return (
        NormGateUpAct(
            norm=NormSpec(f"{prefix}.post_attention_layernorm", model.rms_norm_eps),
            gate_up=LinearSpec(parts, model.hidden_size, shard="out", kind="gate_up"),
        ),
        DownResidual(LinearSpec((LinearPart(f"{name}.down_proj", model.hidden_size),), size, shard="in")),
    )
