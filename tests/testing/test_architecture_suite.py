"""The suite of architectures on graphs that are not Llama's, each against transformers; and its claims on a cache fail
where they should."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import native
from engine.checkpoint.sizes import DecoderSizes, read_sizes, windows_by_layer
from engine.checkpoint.values import Values
from engine.contracts.attention_kernel import AttentionBatch
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder, Value
from engine.contracts.model import ModelConfig
from engine.contracts.ops import LinearPart
from engine.kernels.settings import Kernels
from engine.kv.cache import KVCache
from engine.testing import architecture
from engine.testing.architecture import ArchitectureConformance
from engine.testing.plain import PlainAttention
from engine_plugins.architecture.blocks import gated_mlp
from engine_plugins.architecture.llama import LlamaArchitecture
from tests.selection import few
from tests.testing.mutants.mutant import OnPlugin, failure

HAS_COMPILER = not isinstance(native.find_compiler(), str)
ALL: tuple[Kernels, ...] = ("reference", "torch", *(("native",) if HAS_COMPILER else ()))
SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def heads(b: Builder, h: Value, name: str, sizes: DecoderSizes, bias: bool = False) -> tuple[Value, ...]:
    """Queries, keys and values."""
    counts = {"q": sizes.num_heads, "k": sizes.num_kv_heads, "v": sizes.num_kv_heads}
    q, k, v = (LinearPart(f"{name}.{part}_proj", count * sizes.head_dim, bias) for part, count in counts.items())
    return b.linear(h, q, k, v, shard="out")


def out(b: Builder, x: Value, name: str, sizes: DecoderSizes, bias: bool = False) -> Value:
    return b.linear(x, LinearPart(name, sizes.hidden_size, bias), shard="in")


class Softcapped:
    """Gemma 2: norms before and after, weights of norms less 1, a scaled embedding, soft caps, windows by layer."""

    config = SHAPE | {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "rms_norm_eps": 1e-3, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip

    def describe(self, model: ModelConfig, b: Builder) -> None:
        raw, sizes = model.raw, read_sizes(Values(model.raw))

        def norm(x: Value, name: str) -> Value:
            return b.rms_norm(x, name, sizes.eps, offset=1.0)

        b.positions(sizes.max_position)
        x = b.scale(b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size), sizes.hidden_size**0.5)
        for i, window in enumerate(windows_by_layer(Values(raw), sizes.num_layers)):
            name = f"model.layers.{i}"
            with b.layer(x):
                q, k, v = heads(b, norm(x, f"{name}.input_layernorm"), f"{name}.self_attn", sizes)
                q, k = b.rope(q, k, sizes.rope, sizes.head_dim)
                cap, scale = raw["attn_logit_softcapping"], raw["query_pre_attn_scalar"] ** -0.5
                a = b.attention(q, k, v, sizes.head_dim, window=window, soft_cap=cap, scale=scale)
                a = out(b, a, f"{name}.self_attn.o_proj", sizes)
                x = b.add(x, norm(a, f"{name}.post_attention_layernorm"))
                h = norm(x, f"{name}.pre_feedforward_layernorm")
                x = b.add(
                    x, norm(gated_mlp(b, h, f"{name}.mlp", sizes, "gelu_tanh"), f"{name}.post_feedforward_layernorm")
                )
        logits = b.lm_head(norm(x, "model.norm"), "lm_head", sizes.vocab_size, tied=True)
        b.soft_cap(logits, raw["final_logit_softcapping"])


class Ungated:
    """StarCoder2: LayerNorm with biases, biases everywhere, and a plain MLP."""

    config = SHAPE | {
        "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "norm_epsilon": 1e-3,
        "hidden_act": "gelu_pytorch_tanh", "sliding_window": 8, "use_bias": True,
    }  # fmt: skip

    def describe(self, model: ModelConfig, b: Builder) -> None:
        values = Values(model.raw)
        sizes = read_sizes(values, eps_key="norm_epsilon")

        def norm(x: Value, name: str) -> Value:
            return b.layer_norm(x, name, sizes.eps, bias=True)

        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i, window in enumerate(windows_by_layer(values, sizes.num_layers, every=True)):
            name = f"model.layers.{i}"
            with b.layer(x):
                q, k, v = heads(b, norm(x, f"{name}.input_layernorm"), f"{name}.self_attn", sizes, bias=True)
                a = b.attention(*b.rope(q, k, sizes.rope, sizes.head_dim), v, sizes.head_dim, window=window)
                x = b.add(x, out(b, a, f"{name}.self_attn.o_proj", sizes, bias=True))
                h = norm(x, f"{name}.post_attention_layernorm")
                h = b.linear(h, LinearPart(f"{name}.mlp.c_fc", sizes.intermediate_size, True), shard="out")
                x = b.add(x, out(b, b.activation(h, "gelu_tanh"), f"{name}.mlp.c_proj", sizes, bias=True))
        b.lm_head(norm(x, "model.norm"), "lm_head", sizes.vocab_size, tied=True)


class NormedAfter:
    """OLMo 2: norms after alone, and of queries and keys over all their heads."""

    config = SHAPE | {
        "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "rms_norm_eps": 1e-3,
        "tie_word_embeddings": False,
    }  # fmt: skip

    def describe(self, model: ModelConfig, b: Builder) -> None:
        sizes = read_sizes(Values(model.raw))

        def norm(x: Value, name: str) -> Value:
            return b.rms_norm(x, name, sizes.eps)

        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i in range(sizes.num_layers):
            name = f"model.layers.{i}"
            with b.layer(x):
                q, k, v = heads(b, x, f"{name}.self_attn", sizes)
                q, k = norm(q, f"{name}.self_attn.q_norm"), norm(k, f"{name}.self_attn.k_norm")
                a = b.attention(*b.rope(q, k, sizes.rope, sizes.head_dim), v, sizes.head_dim)
                a = out(b, a, f"{name}.self_attn.o_proj", sizes)
                x = b.add(x, norm(a, f"{name}.post_attention_layernorm"))
                m = gated_mlp(b, x, f"{name}.mlp", sizes, "silu")
                x = b.add(x, norm(m, f"{name}.post_feedforward_layernorm"))
        b.lm_head(norm(x, "model.norm"), "lm_head", sizes.vocab_size)


class Parallel:
    """Cohere 2, its layers without a window: attention and MLP of one normed input, no rotation, scaled logits."""

    config = SHAPE | {
        "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "layer_norm_eps": 1e-3, "logit_scale": 0.25,
        "layer_types": ["full_attention"] * 2, "sliding_window": 8,
    }  # fmt: skip

    def describe(self, model: ModelConfig, b: Builder) -> None:
        sizes = read_sizes(Values(model.raw), eps_key="layer_norm_eps")
        b.positions(sizes.max_position)
        x = b.embed("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)
        for i in range(sizes.num_layers):
            name = f"model.layers.{i}"
            with b.layer(x):
                h = b.layer_norm(x, f"{name}.input_layernorm", sizes.eps)
                q, k, v = heads(b, h, f"{name}.self_attn", sizes)
                a = out(b, b.attention(q, k, v, sizes.head_dim), f"{name}.self_attn.o_proj", sizes)
                x = b.add(b.add(x, a), gated_mlp(b, h, f"{name}.mlp", sizes, "silu"))
        normed = b.layer_norm(x, "model.norm", sizes.eps)
        b.scale(b.lm_head(normed, "lm_head", sizes.vocab_size, tied=True), model.raw["logit_scale"])


class Family(ArchitectureConformance):
    """Of one of the classes above."""

    __test__ = False
    kernels = ALL
    family: type[Any]

    def make(self) -> Any:
        return self.family()

    def models(self) -> Mapping[str, Mapping[str, Any]]:
        return {"small": self.family.config}

    def reference(self, model: ModelConfig) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds, and most tests here need none

        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**model.raw), attn_implementation="eager")


class TestSoftcapped(Family):
    __test__ = True
    family = Softcapped


class TestUngated(Family):
    __test__ = True
    family = Ungated


class TestNormedAfter(Family):
    __test__ = True
    family = NormedAfter


class TestParallel(Family):
    __test__ = True
    family = Parallel


# Claims that no architecture breaks: kernels and caches with a bug ----------------------------------------------------

CHUNKS = "test_chunks_and_decode_steps_give_the_logits_of_the_whole"
NEIGHBOURS = "test_neighbours_in_a_batch_do_not_change_a_row"
PREFIX = "test_a_cached_prefix_gives_the_logits_of_a_cold_start"
DRAFTS = "test_rejected_drafts_change_nothing"
ROUNDED = "test_rounded_weights_change_little"
ON_A_CACHE = (CHUNKS, NEIGHBOURS, PREFIX, DRAFTS)


class Plain(OnPlugin, ArchitectureConformance):
    """Llama's suite, which passes."""

    __test__ = False

    def make(self) -> LlamaArchitecture:
        return LlamaArchitecture(SlotConfig())

    def models(self) -> Mapping[str, Mapping[str, Any]]:
        return {"small": SHAPE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}}


def forgets_what_is_cached(patch: pytest.MonkeyPatch) -> None:
    forward = PlainAttention.forward

    def of_this_step(self: Any, prepared: AttentionBatch, op: Any, q: Tensor, cache: Any) -> Tensor:
        lens = torch.tensor(prepared.q_lens).int()
        return forward(self, replace(prepared, kv_lens_device=lens), op, q, cache)

    patch.setattr(PlainAttention, "forward", of_this_step)


def takes_the_first_row_for_all(patch: pytest.MonkeyPatch) -> None:
    forward = PlainAttention.forward

    def of_the_first(self: Any, prepared: AttentionBatch, op: Any, q: Tensor, cache: Any) -> Tensor:
        tables = prepared.block_tables[:1].expand_as(prepared.block_tables)
        return forward(self, replace(prepared, block_tables=tables), op, q, cache)

    patch.setattr(PlainAttention, "forward", of_the_first)


def copies_no_block(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "copy_block", lambda self, group, source, target: None)


def never_overwrites(patch: pytest.MonkeyPatch) -> None:
    write = KVCache.write

    def once(self: KVCache, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        fresh = ~self.layers[layer].k.flatten(0, 1)[slots].flatten(1).any(dim=1)
        write(self, layer, slots[fresh], k[fresh], v[fresh])

    patch.setattr(KVCache, "write", once)


def rounds_to_quarters(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(architecture.ROUNDED, "int8", (lambda weight: (weight * 4).round() / 4, 1.0))


def rounds_to_signs(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(architecture.ROUNDED, "int4", (lambda weight: weight.sign(), 24.0))


Break = Callable[[pytest.MonkeyPatch], None]


@few(3)
@pytest.mark.parametrize(
    ("breaks", "caught_by"),
    [
        (forgets_what_is_cached, (CHUNKS, NEIGHBOURS, PREFIX, DRAFTS)),
        (takes_the_first_row_for_all, (NEIGHBOURS,)),
        (copies_no_block, (PREFIX,)),
        (never_overwrites, (DRAFTS,)),
        (rounds_to_quarters, (ROUNDED,)),
        (rounds_to_signs, (ROUNDED,)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bug_below_the_graph_breaks_these_claims_and_no_other(
    breaks: Break, caught_by: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    every = (*ON_A_CACHE, ROUNDED)
    assert [test for test in every if failure(Plain, test) is not None] == []
    breaks(monkeypatch)
    assert tuple(test for test in every if failure(Plain, test) is not None) == caught_by


def test_a_model_that_is_too_large_to_compute_is_only_described() -> None:
    large = SHAPE | {"architectures": ["LlamaForCausalLM"], "vocab_size": 2_000_000}

    class Large(Plain):
        def models(self) -> Mapping[str, Mapping[str, Any]]:
            return {"large": large}

    assert failure(Large, "test_every_tensor_has_a_name_of_its_own") is None
    with pytest.raises(pytest.skip.Exception, match=r"64 million weights: set model.path to a model of at most 50"):
        Large().test_rejected_drafts_change_nothing("large")
