"""The llama architecture describes; it refuses what it does not know."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.contracts.config import SlotConfig
from engine.contracts.ops import Attention, NormQKVRopeWrite
from engine.testing.context import build_context
from engine_plugins.architecture.llama import LlamaArchitecture

CONTEXT = build_context()
ARCHITECTURE = LlamaArchitecture(SlotConfig(), CONTEXT)


def first_qkv(architecture: str, **raw: bool) -> NormQKVRopeWrite:
    op = ARCHITECTURE.describe(replace(CONTEXT.model, architecture=architecture, raw=raw)).layers[0][0]
    assert isinstance(op, NormQKVRopeWrite)
    return op


def test_qwen2_has_qkv_biases_and_mistral_has_none() -> None:
    assert all(part.bias for part in first_qkv("Qwen2ForCausalLM").qkv.parts)
    assert not any(part.bias for part in first_qkv("MistralForCausalLM").qkv.parts)


def test_only_qwen3_norms_its_heads() -> None:
    assert first_qkv("Qwen3ForCausalLM").q_norm is not None
    assert first_qkv("LlamaForCausalLM").q_norm is None


def test_each_layer_has_its_own_window() -> None:
    model = replace(CONTEXT.model, num_layers=2, layer_windows=(None, 16))
    ops = [op for layer in ARCHITECTURE.describe(model).layers for op in layer if isinstance(op, Attention)]
    assert [op.window for op in ops] == [None, 16]


def test_an_unknown_activation_or_family_is_named() -> None:
    with pytest.raises(ValueError, match="hidden_act 'relu'"):
        ARCHITECTURE.describe(replace(CONTEXT.model, hidden_act="relu"))
    with pytest.raises(ValueError, match="'MambaForCausalLM'"):
        ARCHITECTURE.describe(replace(CONTEXT.model, architecture="MambaForCausalLM"))
