"""The suite of architectures on graphs that are not Llama's, each against transformers; and its claims on a cache fail
where they should."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import native
from engine.contracts.attention_kernel import AttentionBatch
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder, Value
from engine.contracts.model import ModelFacts
from engine.contracts.ops import LinearPart
from engine.kernels.settings import Kernels
from engine.kv.cache import KVCache
from engine.testing.architecture import ArchitectureConformance
from engine.testing.context import build_context
from engine.testing.plain import PlainAttention, RoundedQuantizer
from engine_plugins.architecture.llama import LlamaArchitecture
from tests.testing.mutants.mutant import cases, failure, suite_on
from tests.testing.mutants.mutant import OnPlugin

HAS_COMPILER = not isinstance(native.find_compiler(), str)
ALL: tuple[Kernels, ...] = ("reference", "torch", *(("native",) if HAS_COMPILER else ()))
SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def heads(b: Builder, h: Value, model: ModelFacts, name: str, bias: bool = False) -> tuple[Value, ...]:
    """Queries, keys and values."""
    counts = {"q": model.num_heads, "k": model.num_kv_heads, "v": model.num_kv_heads}
    sizes = {f"{name}.{part}_proj": count * model.head_dim for part, count in counts.items()}
    return b.linear(h, *(LinearPart(part, size, bias) for part, size in sizes.items()), shard="out")  # type: ignore[call-overload,no-any-return]


def out(b: Builder, x: Value, model: ModelFacts, name: str, bias: bool = False) -> Value:
    return b.linear(x, LinearPart(name, model.hidden_size, bias), shard="in")


def mlp(b: Builder, h: Value, model: ModelFacts, name: str, act: Any = "silu") -> Value:
    gate, up = (LinearPart(f"{name}.{part}_proj", model.intermediate_size) for part in ("gate", "up"))
    return out(b, b.gated(*b.linear(h, gate, up, shard="out"), act), model, f"{name}.down_proj")


class Softcapped:
    """Gemma 2: norms before and behind, weights of norms less 1, a scaled embedding, soft caps, windows by layer."""

    config = SHAPE | {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "rms_norm_eps": 1e-3, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip

    def describe(self, model: ModelFacts, b: Builder) -> None:
        def norm(x: Value, name: str) -> Value:
            return b.rms_norm(x, name, model.rms_norm_eps, offset=1.0)

        raw = model.raw
        x = b.scale(b.embed("model.embed_tokens", model.vocab_size, model.hidden_size), model.hidden_size**0.5)
        for i, window in enumerate(model.layer_windows):
            name = f"model.layers.{i}"
            with b.layer(x):
                q, k, v = heads(b, norm(x, f"{name}.input_layernorm"), model, f"{name}.self_attn")
                q, k = b.rope(q, k, model.rope, model.head_dim)
                a = b.attention(
                    q, k, v, model.head_dim, window=window, soft_cap=raw["attn_logit_softcapping"],
                    scale=raw["query_pre_attn_scalar"] ** -0.5,
                )  # fmt: skip
                a = out(b, a, model, f"{name}.self_attn.o_proj")
                x = b.add(x, norm(a, f"{name}.post_attention_layernorm"))
                m = mlp(b, norm(x, f"{name}.pre_feedforward_layernorm"), model, f"{name}.mlp", "gelu_tanh")
                x = b.add(x, norm(m, f"{name}.post_feedforward_layernorm"))
        logits = b.lm_head(norm(x, "model.norm"), "lm_head", model.vocab_size, tied=True)
        b.soft_cap(logits, raw["final_logit_softcapping"])


class Ungated:
    """StarCoder2: LayerNorm with biases, biases everywhere, and a plain MLP."""

    config = SHAPE | {
        "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "norm_epsilon": 1e-3,
        "hidden_act": "gelu_pytorch_tanh", "sliding_window": 8, "use_bias": True,
    }  # fmt: skip

    def describe(self, model: ModelFacts, b: Builder) -> None:
        def norm(x: Value, name: str) -> Value:
            return b.layer_norm(x, name, model.raw["norm_epsilon"], bias=True)

        x = b.embed("model.embed_tokens", model.vocab_size, model.hidden_size)
        for i, window in enumerate(model.layer_windows):
            name = f"model.layers.{i}"
            with b.layer(x):
                q, k, v = heads(b, norm(x, f"{name}.input_layernorm"), model, f"{name}.self_attn", bias=True)
                a = b.attention(*b.rope(q, k, model.rope, model.head_dim), v, model.head_dim, window=window)
                x = b.add(x, out(b, a, model, f"{name}.self_attn.o_proj", bias=True))
                h = norm(x, f"{name}.post_attention_layernorm")
                h = b.linear(h, LinearPart(f"{name}.mlp.c_fc", model.intermediate_size, True), shard="out")
                x = b.add(x, out(b, b.activation(h, "gelu_tanh"), model, f"{name}.mlp.c_proj", bias=True))
        b.lm_head(norm(x, "model.norm"), "lm_head", model.vocab_size, tied=True)


class NormedBehind:
    """OLMo 2: norms behind alone, and of queries and keys over all their heads."""

    config = SHAPE | {
        "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "rms_norm_eps": 1e-3, "tie_word_embeddings": False,
    }  # fmt: skip

    def describe(self, model: ModelFacts, b: Builder) -> None:
        def norm(x: Value, name: str) -> Value:
            return b.rms_norm(x, name, model.rms_norm_eps)

        x = b.embed("model.embed_tokens", model.vocab_size, model.hidden_size)
        for i in range(model.num_layers):
            name = f"model.layers.{i}"
            with b.layer(x):
                q, k, v = heads(b, x, model, f"{name}.self_attn")
                q, k = norm(q, f"{name}.self_attn.q_norm"), norm(k, f"{name}.self_attn.k_norm")
                a = b.attention(*b.rope(q, k, model.rope, model.head_dim), v, model.head_dim)
                a = out(b, a, model, f"{name}.self_attn.o_proj")
                x = b.add(x, norm(a, f"{name}.post_attention_layernorm"))
                x = b.add(x, norm(mlp(b, x, model, f"{name}.mlp"), f"{name}.post_feedforward_layernorm"))
        b.lm_head(norm(x, "model.norm"), "lm_head", model.vocab_size)


class Parallel:
    """Cohere 2, its layers without a window: attention and MLP of one normed input, no rotation, scaled logits."""

    config = SHAPE | {
        "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "layer_norm_eps": 1e-3, "logit_scale": 0.25,
        "layer_types": ["full_attention"] * 2, "sliding_window": 8,
    }  # fmt: skip

    def describe(self, model: ModelFacts, b: Builder) -> None:
        eps = model.raw["layer_norm_eps"]
        x = b.embed("model.embed_tokens", model.vocab_size, model.hidden_size)
        for i in range(model.num_layers):
            name = f"model.layers.{i}"
            with b.layer(x):
                h = b.layer_norm(x, f"{name}.input_layernorm", eps)
                q, k, v = heads(b, h, model, f"{name}.self_attn")
                a = out(b, b.attention(q, k, v, model.head_dim), model, f"{name}.self_attn.o_proj")
                x = b.add(b.add(x, a), mlp(b, h, model, f"{name}.mlp"))
        logits = b.lm_head(b.layer_norm(x, "model.norm", eps), "lm_head", model.vocab_size, tied=True)
        b.scale(logits, model.raw["logit_scale"])


class Family(ArchitectureConformance):
    """Of one of the classes above."""

    __test__ = False
    kernels = ALL
    family: type[Any]

    def make(self) -> Any:
        return self.family()

    def models(self) -> Mapping[str, Mapping[str, Any]]:
        return {"small": self.family.config}

    def reference(self, model: ModelFacts) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds, and most tests here need none

        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**model.raw), attn_implementation="eager")


class TestSoftcapped(Family):
    __test__ = True
    family = Softcapped


class TestUngated(Family):
    __test__ = True
    family = Ungated


class TestNormedBehind(Family):
    __test__ = True
    family = NormedBehind


class TestParallel(Family):
    __test__ = True
    family = Parallel
