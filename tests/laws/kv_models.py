"""Models of every kind of KV group, with what transformers says after some prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.assembly.assemble import assemble
from engine.contracts.request import EngineRequest, SamplingParams
from engine.loop.core import EngineCore
from engine.startup.build import Engine, build_engine
from engine.startup.segments import Segments

from .drafted import COMMON, Answer, answers

WINDOW, OUTPUT = 24, 20
SHAPE = {
    "vocab_size": 199, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "deepseek_v2": {
        "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
        "v_head_dim": 10, "first_k_dense_replace": 4,
    },
    "qwen3_5_text": {
        "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 12, "full_attention_interval": 2,
    },
    "llama4_text": {"head_dim": 8, "attention_chunk_size": WINDOW, "moe_layers": [], "intermediate_size_mlp": 48},
    "gemma4_text": {
        "head_dim": 8, "global_head_dim": 8, "sliding_window": WINDOW, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": 199,
        "hidden_size_per_layer_input": 8, "pad_token_id": None,
    },
}  # fmt: skip
"""A window in every layer; in the last two of four; latent keys; a recurrent state in the first and third of four;
chunks in the first three of four; a window in the first and third, which share a cache, as the others do."""
WINDOWS = ("mistral", "qwen2", "llama4_text", "gemma4_text")
GREEDY = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
LENGTHS = (5, 23, 24, 25, 70, 150)
ROOM = ("scheduler.max_requests=4", "scheduler.token_budget=48")


@dataclass(frozen=True, slots=True)
class Reference:
    """A checkpoint, prompts, and what transformers says after them."""

    path: Path
    prompts: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]

    def requests(self, name: str) -> list[EngineRequest]:
        return [EngineRequest(f"{name}{i}", prompt, GREEDY) for i, prompt in enumerate(self.prompts)]

    def turns(self, name: str) -> list[EngineRequest]:
        """Each text and what follows it but the last ten tokens: the next turn of a conversation."""
        params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
        texts = zip(self.prompts, self.tokens, strict=True)
        return [EngineRequest(f"{name}{i}", (*a, *b[:-10]), params) for i, (a, b) in enumerate(texts)]

    def check(self, core: EngineCore, batch: int = 6) -> tuple[list[Answer], list[Answer]]:
        """Tokens cold, and again as next turns."""
        first = answers(core, self.requests("first"), batch)
        assert tuple(answer.tokens for answer in first) == self.tokens
        then = answers(core, self.turns("then"), batch)
        assert tuple(answer.tokens for answer in then) == tuple(tokens[-10:] for tokens in self.tokens)
        return first, then


References = Callable[[str], Reference]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    @cache
    def made(name: str) -> Reference:
        torch.manual_seed(3)
        config = AutoConfig.for_model(name, **SHAPE | FAMILIES[name])
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        path = tmp_path_factory.mktemp(name)
        model.save_pretrained(path)
        generator = torch.Generator().manual_seed(5)
        prompts = [torch.randint(0, 199, (length,), generator=generator).tolist() for length in LENGTHS]
        tokens = [greedy(model, prompt) for prompt in prompts]
        return Reference(path, tuple(map(tuple, prompts)), tuple(map(tuple, tokens)))

    return made


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    """All tokens anew for each one: no cache of theirs."""
    tokens = list(prompt)
    for _ in range(OUTPUT):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def start(reference: Reference, *overrides: str, segments: Segments | None = None) -> Engine:
    return build_engine(assemble([f"model.path={reference.path}", *COMMON, *ROOM, *overrides]), segments=segments)


DRAFTERS = {
    "ngram": ("drafter=ngram", "drafter.min_match=1", "drafter.adaptive=false"),
    "early_exit": ("drafter=early_exit", "drafter.layers=3", "drafter.adaptive=false"),
    "draft_model": ("drafter=draft_model", "drafter.path={path}", "drafter.adaptive=false"),
}
