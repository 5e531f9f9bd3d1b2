"""Architecture ``mine``: a decoder in the manner of Llama, written down as a graph of operations."""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint.sizes import DecoderSizes, read_sizes, windows_by_layer
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder, Value
from engine.contracts.model import DeviceFacts, ModelConfig
from engine.contracts.ops import LinearPart
from engine.contracts.provider import Provider
from engine.hookspecs import hookimpl

FAMILIES = ("MineForCausalLM", "LlamaForCausalLM")
"""First entry of ``architectures`` in ``config.json``. The second is there so that the bundled model can be served."""


@dataclass(frozen=True)
class MineArchitectureConfig(SlotConfig):
    """The keys ``architecture.<field>``: add fields with a type, a default and a line on what they do."""


def only_this_family(model: ModelConfig, device: DeviceFacts) -> tuple[str, ...]:
    """Why the plugin cannot compute this checkpoint; empty: it is of the family, and ``describe`` judges the rest."""
    return () if model.architecture in FAMILIES else (f"it computes {', '.join(FAMILIES)}, not {model.architecture}",)


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

    def __init__(self, config: MineArchitectureConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        """``model.raw`` is ``config.json``. What is recorded in ``b`` is computed in that order; names are those of the
        checkpoint. Raises ``ValueError`` for what the plugin does not compute."""
        values = Values(model.raw)
        sizes = read_sizes(values)
        if any(values.flag(key, False) for key in ("attention_bias", "mlp_bias")):
            raise ValueError("attention_bias and mlp_bias: it has no biases, expected false")
        if (act := values.text("hidden_act", "silu")) != "silu":
            raise ValueError(f"hidden_act={act}: expected silu")
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i, window in enumerate(windows_by_layer(values, sizes.num_layers)):
            name = f"model.layers.{i}"
            with b.layer(x):
                h = b.rms_norm(x, f"{name}.input_layernorm", sizes.eps)
                x = b.add(x, _attention(b, h, sizes, f"{name}.self_attn", window))
                h = b.rms_norm(x, f"{name}.post_attention_layernorm", sizes.eps)
                x = b.add(x, _mlp(b, h, sizes, f"{name}.mlp"))
        b.lm_head(b.rms_norm(x, "model.norm", sizes.eps), "lm_head", sizes.vocab_size, tied=sizes.tied)


def _attention(b: Builder, h: Value, sizes: DecoderSizes, name: str, window: int | None) -> Value:
    """``shard``: the axis that tensor parallelism cuts, ``out`` on the way in and ``in`` on the way back."""
    dim, kv_size = sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    q_proj = LinearPart(f"{name}.q_proj", sizes.num_heads * dim)
    k_proj, v_proj = LinearPart(f"{name}.k_proj", kv_size), LinearPart(f"{name}.v_proj", kv_size)
    q, k, v = b.linear(h, q_proj, k_proj, v_proj, shard="out")
    q, k = b.rope(q, k, sizes.rope, dim)
    a = b.attention(q, k, v, dim, window=window)
    return b.linear(a, LinearPart(f"{name}.o_proj", sizes.hidden_size), shard="in")


def _mlp(b: Builder, h: Value, sizes: DecoderSizes, name: str) -> Value:
    gate_proj, up_proj = (LinearPart(f"{name}.{part}_proj", sizes.intermediate_size) for part in ("gate", "up"))
    gate, up = b.linear(h, gate_proj, up_proj, shard="out")
    return b.linear(b.gated(gate, up, "silu"), LinearPart(f"{name}.down_proj", sizes.hidden_size), shard="in")
