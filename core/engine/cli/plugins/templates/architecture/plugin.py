"""Architecture ``mine``: a decoder in the manner of Llama, written down as a graph of operations."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder, Value
from engine.contracts.model import DeviceFacts, ModelFacts
from engine.contracts.ops import LinearPart
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

    def describe(self, model: ModelFacts, b: Builder) -> None:
        """Embedding, layers and head, in the order in which they are computed. Names are those of the checkpoint."""
        x = b.embed("model.embed_tokens", model.vocab_size, model.hidden_size)
        for i in range(model.num_layers):
            name = f"model.layers.{i}"
            with b.layer(x):
                h = b.rms_norm(x, f"{name}.input_layernorm", model.rms_norm_eps)
                x = b.add(x, _attention(b, h, model, f"{name}.self_attn", model.layer_windows[i]))
                h = b.rms_norm(x, f"{name}.post_attention_layernorm", model.rms_norm_eps)
                x = b.add(x, _mlp(b, h, model, f"{name}.mlp"))
        normed = b.rms_norm(x, "model.norm", model.rms_norm_eps)
        b.lm_head(normed, "lm_head", model.vocab_size, tied=model.tie_embeddings)


def _attention(b: Builder, h: Value, model: ModelFacts, name: str, window: int | None) -> Value:
    """``shard``: the axis that tensor parallelism cuts, ``out`` on the way in and ``in`` on the way back."""
    dim, kv_size = model.head_dim, model.num_kv_heads * model.head_dim
    q_proj = LinearPart(f"{name}.q_proj", model.num_heads * dim)
    k_proj, v_proj = LinearPart(f"{name}.k_proj", kv_size), LinearPart(f"{name}.v_proj", kv_size)
    q, k, v = b.linear(h, q_proj, k_proj, v_proj, shard="out")
    q, k = b.rope(q, k, model.rope, dim)
    a = b.attention(q, k, v, dim, window=window)
    return b.linear(a, LinearPart(f"{name}.o_proj", model.hidden_size), shard="in")


def _mlp(b: Builder, h: Value, model: ModelFacts, name: str) -> Value:
    size = model.intermediate_size
    gate_proj, up_proj = LinearPart(f"{name}.gate_proj", size), LinearPart(f"{name}.up_proj", size)
    gate, up = b.linear(h, gate_proj, up_proj, shard="out")
    return b.linear(b.gated(gate, up, "silu"), LinearPart(f"{name}.down_proj", model.hidden_size), shard="in")
