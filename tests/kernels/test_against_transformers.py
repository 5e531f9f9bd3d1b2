"""Logits and greedy tokens against Hugging Face transformers, float32, for every supported variant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.kernels.settings import Kernels
from tests.kernels.paged_loop import PagedLoop, load
from tests.needs import needs_compiler
from tests.selection import few

TOLERANCE = 1e-4
PROMPT, OUTPUT = 40, 32
SHAPE: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "tie_word_embeddings": False,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def rope(kind: str, **params: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **params}}


LLAMA, MISTRAL = (LlamaConfig, LlamaForCausalLM), (MistralConfig, MistralForCausalLM)
QWEN2, QWEN3 = (Qwen2Config, Qwen2ForCausalLM), (Qwen3Config, Qwen3ForCausalLM)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}
VARIANTS: dict[str, tuple[tuple[Any, Any], dict[str, Any]]] = {
    "llama2_mha": (LLAMA, {"num_key_value_heads": 4}),
    "llama_gqa_tied": (LLAMA, {"tie_word_embeddings": True}),
    "llama_mqa_head_dim": (LLAMA, {"num_key_value_heads": 1, "head_dim": 24}),
    "llama_biases": (LLAMA, {"attention_bias": True, "mlp_bias": True}),
    "llama3_rope": (LLAMA, rope("llama3", **LLAMA3)),
    "linear_rope": (LLAMA, rope("linear", factor=4.0)),
    "dynamic_rope": (LLAMA, {"max_position_embeddings": PROMPT + OUTPUT} | rope("dynamic", factor=2.0)),
    "yarn_rope": (LLAMA, rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "yarn_rope_mscale": (
        LLAMA,
        rope(
            "yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=16.0, beta_slow=2.0,
            mscale=1.0, mscale_all_dim=0.5, truncate=False,
        ),
    ),
    "longrope": (
        LLAMA,
        rope(
            "longrope", factor=4.0, original_max_position_embeddings=128,
            short_factor=[1.0 + 0.1 * i for i in range(8)], long_factor=[2.0 + i for i in range(8)],
        ),
    ),
    "mistral": (MISTRAL, {"sliding_window": None}),
    "mistral_window": (MISTRAL, {"sliding_window": 16}),
    "qwen2": (QWEN2, {}),
    "qwen2_tied": (QWEN2, {"tie_word_embeddings": True}),
    "qwen2_sliding_layers": (QWEN2, QWEN_WINDOW),
    "qwen3": (QWEN3, {"head_dim": 32}),
    "qwen3_tied_bias": (QWEN3, {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3_sliding_layers": (QWEN3, {"head_dim": 16} | QWEN_WINDOW),
    "gelu": (LLAMA, {"hidden_act": "gelu_pytorch_tanh"}),
}  # fmt: skip


def make(folder: Path, name: str) -> Any:
    """A random model of this variant, biases and norms included, saved to ``folder``."""
    (config_class, model_class), options = VARIANTS[name]
    torch.manual_seed(11)
    model = model_class(config_class(**(SHAPE | options))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # transformers starts these at 0 and 1, where a mistake would not show
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def hf_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Token by token with transformers' own cache."""
    cache, new, out = None, prompt, []
    for _ in range(count):
        answer = model(torch.tensor([new]), past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        new = [int(answer.logits[0, -1].argmax())]
        out += new
    return out


@few(6)
@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_compiler)])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_tokens_equal_transformers(
    name: str, kernels: Kernels, tmp_path: Path, record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = make(tmp_path, name)
    facts, ours = load(tmp_path, kernels=kernels)
    prompt = torch.randint(0, SHAPE["vocab_size"], (PROMPT,), generator=torch.Generator().manual_seed(5)).tolist()
    with torch.no_grad():
        want = theirs(torch.tensor([prompt])).logits[0]
    difference = float((PagedLoop(facts, ours).logits(prompt) - want).abs().max())
    tokens, expected = PagedLoop(facts, ours).greedy(prompt, OUTPUT), hf_greedy(theirs, prompt, OUTPUT)
    equal = sum(a == b for a, b in zip(tokens, expected, strict=True))
    record_property("max_abs_difference", difference)
    with capsys.disabled():
        print(
            f"\n{name:22s} {kernels:8s} max |difference| {difference:.1e} of {float(want.abs().max()):.1f}, "
            f"tokens {equal}/{OUTPUT}"
        )
    assert difference <= TOLERANCE
    assert tokens == expected
