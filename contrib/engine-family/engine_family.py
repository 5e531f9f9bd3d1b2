"""Apertus (arXiv 2509.14233): Llama with norms of query and key heads, and an MLP without a gate whose activation,
xIELU (arXiv 2411.13010), has two learned numbers in each layer: a torch function, as no op of the engine has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.checkpoint.files import clipped
from engine.checkpoint.sizes import DecoderSizes, read_sizes
from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder, Value
from engine.contracts.model import DeviceFacts, ModelConfig
from engine.contracts.ops import LinearPart
from engine.contracts.provider import Provider
from engine.hookspecs import hookimpl

if TYPE_CHECKING:
    from torch import Tensor

FAMILY = "ApertusForCausalLM"
DEFAULTS: dict[str, Any] = {
    "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "hidden_act": "xielu",
    "rope_theta": 12e6,
}  # fmt: skip
ROPE: dict[str, Any] = {
    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
"""What ``config.json`` may leave out."""


def unsupported(model: ModelConfig, device: DeviceFacts) -> tuple[str, ...]:
    return () if model.architecture == FAMILY else (f"it computes {FAMILY}",)


@hookimpl
def engine_architecture() -> list[Provider]:
    doc = "Apertus: norms of heads, xIELU instead of a gate."
    return [Provider("apertus", "engine_family:ApertusArchitecture", unsupported=unsupported, doc=doc)]


class ApertusArchitecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def describe(self, model: ModelConfig, b: Builder) -> None:
        values = Values({**DEFAULTS, **model.raw})
        if not values.has("rope_parameters") and not values.has("rope_scaling"):
            values = Values({**values.values, "rope_parameters": ROPE})
        for key, expected in (("hidden_act", "xielu"), ("layer_types", None), ("mlp_bias", False)):
            if values.has(key) and values.values[key] != expected:
                raise ValueError(f"{key}={clipped(values.values[key])}: expected {expected!r}")
        sizes, bias = read_sizes(values), values.flag("attention_bias", False)
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i in range(sizes.num_layers):
            name = f"model.layers.{i}"
            with b.layer(x):
                h = b.rms_norm(x, f"{name}.attention_layernorm", sizes.eps)
                x = b.add(x, attention(b, h, f"{name}.self_attn", sizes, bias))
                h = b.rms_norm(x, f"{name}.feedforward_layernorm", sizes.eps)
                x = b.add(x, mlp(b, h, f"{name}.mlp", sizes))
        b.lm_head(b.rms_norm(x, "model.norm", sizes.eps), "lm_head", sizes.vocab_size, tied=sizes.tied)


def attention(b: Builder, h: Value, name: str, sizes: DecoderSizes, bias: bool) -> Value:
    dim = sizes.head_dim
    heads = {"q": sizes.num_heads, "k": sizes.num_kv_heads, "v": sizes.num_kv_heads}
    parts = [LinearPart(f"{name}.{part}_proj", count * dim, bias) for part, count in heads.items()]
    q, k, v = b.linear(h, parts[0], *parts[1:], shard="out")
    q = b.rms_norm(q, f"{name}.q_norm", sizes.eps, size=dim)
    k = b.rms_norm(k, f"{name}.k_norm", sizes.eps, size=dim)
    a = b.attention(*b.rope(q, k, sizes.rope, dim), v, dim)
    return b.linear(a, LinearPart(f"{name}.o_proj", sizes.hidden_size, bias), shard="in")


def mlp(b: Builder, h: Value, name: str, sizes: DecoderSizes) -> Value:
    size = sizes.intermediate_size
    up = b.linear(h, LinearPart(f"{name}.up_proj", size), shard="out")
    numbers: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
    tensors = {f"{name}.act_fn.{number}": shape for number, shape in numbers.items()}
    a = b.torch_function("engine_family:xielu", up, size=size, tensors=tensors, by_feature=True)
    return b.linear(a, LinearPart(f"{name}.down_proj", sizes.hidden_size), shard="in")


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """Its integral grows with the square of what is positive, and like an exponential below. ``eps`` is below 0."""
    from torch import expm1, minimum, where  # this module is imported where there is no torch
    from torch.nn.functional import softplus

    square = softplus(alpha_p) * x * x
    decay = (expm1(minimum(x, eps)) - x) * (beta + softplus(alpha_n))
    return where(x > 0, square, decay) + beta * x
