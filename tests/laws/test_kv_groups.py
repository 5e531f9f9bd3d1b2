"""Models of every kind of KV group: whatever happens to requests, their tokens are those of transformers, and no group
holds more blocks than its queries see."""

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
from tests.selection import few

from ..needs import needs_compiler
from ..step.capturing import capturing_engine
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


def start(reference: Reference, *overrides: str) -> Engine:
    return build_engine(assemble([f"model.path={reference.path}", *COMMON, *ROOM, *overrides]))


DRAFTERS = {
    "ngram": ("drafter=ngram", "drafter.min_match=1", "drafter.adaptive=false"),
    "early_exit": ("drafter=early_exit", "drafter.layers=3", "drafter.adaptive=false"),
    "draft_model": ("drafter=draft_model", "drafter.path={path}", "drafter.adaptive=false"),
}


@few(1)
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("qwen2", ("kv_allocator=paged", "execution=eager", "overlap=false")),
        ("mistral", ("kv_allocator=contiguous", "overlap=true")),
        ("llama4_text", ("kv_allocator=paged", "execution=eager", "overlap=true", "scheduler.token_budget=512")),
        ("gemma4_text", ("kv_allocator=paged", "execution=eager", "overlap=false")),
        pytest.param("qwen2", ("kv_allocator=contiguous", "scheduler.token_budget=512"), marks=pytest.mark.slow),
        ("mistral", ("kv_allocator=paged", "scheduler.token_budget=512", "scheduler=static")),
        pytest.param("qwen2", ("kv_allocator=paged", "scheduler=continuous"), marks=pytest.mark.slow),
        ("deepseek_v2", ("kv_allocator=paged", "overlap=true")),
        ("qwen3_5_text", ("kv_allocator=paged", "execution=eager", "overlap=false", "kv_allocator.block_size=64")),
        ("qwen3_5_text", ("kv_allocator=contiguous", "overlap=true", "scheduler.token_budget=512")),
    ],
)
def test_tokens_are_those_of_transformers(references: References, name: str, overrides: tuple[str, ...]) -> None:
    engine = start(references(name), *overrides)
    references(name).check(engine.core)
    engine.core.close()


@few(2)
@needs_compiler
@pytest.mark.parametrize("name", FAMILIES)
def test_next_turns_are_found_in_all_groups(references: References, name: str) -> None:
    rows = "scheduler.max_requests=8"  # nothing is evicted
    engine = start(references(name), "kv_allocator=prefix_cache", "execution=compile", rows)
    assert engine.info.notes == () or name not in WINDOWS, "steps are programs"
    _, then = references(name).check(engine.core)
    cached = [answer.timings.cached_tokens for answer in then if answer.timings is not None]
    assert cached == [length + OUTPUT - 11 for length in LENGTHS], "all but the last token"
    engine.core.close()


@few(2)
@pytest.mark.parametrize(
    ("name", "tokens", "overrides"),
    [
        ("qwen2", 224, ("kv_allocator=prefix_cache",)),
        ("mistral", 192, ("kv_allocator=prefix_cache", "overlap=false", *DRAFTERS["ngram"])),
        ("llama4_text", 224, ("kv_allocator=prefix_cache", *DRAFTERS["ngram"])),
        pytest.param("qwen2", 192, ("kv_allocator=paged", *DRAFTERS["early_exit"]), marks=pytest.mark.slow),
        ("qwen3_5_text", 224, ("kv_allocator=prefix_cache", *DRAFTERS["ngram"])),
        ("deepseek_v2", 192, ("kv_allocator=prefix_cache", "overlap=false")),
    ],
)
def test_with_little_memory_tokens_are_the_same(
    references: References, name: str, tokens: int, overrides: tuple[str, ...]
) -> None:
    reference = references(name)
    engine = start(reference, f"memory.kv_tokens={tokens}", "scheduler.token_budget=16", *overrides)
    reference.check(engine.core)
    engine.core.close()


@few(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_preempted_requests_go_on_as_they_would_have(references: References, name: str) -> None:
    """Four short prompts that grow at once: the pool ends before their texts do."""
    reference = references(name)
    engine = start(reference, "memory.kv_tokens=112", "kv_allocator=prefix_cache", "scheduler.token_budget=16")
    short = Reference(reference.path, reference.prompts[:4] * 2, reference.tokens[:4] * 2)
    first, _ = short.check(engine.core, batch=8)
    preempted = sum(answer.timings.preemptions for answer in first if answer.timings is not None)
    assert preempted
    engine.core.close()


@pytest.mark.parametrize("name", WINDOWS)
def test_the_cache_takes_what_windows_need(references: References, name: str) -> None:
    engine = start(references(name), "scheduler.max_requests=2")
    of_all, a_window, a_step = 2 * 256 // 8 + 1, WINDOW // 8 + 1, -(-(48 + 1) // 8)
    beside_a_half, beside_a_quarter = (
        int(64 * (full + (1 - full) * a_window / 32)) + a_step + 1 for full in (0.5, 0.25)
    )
    layers = {
        "mistral": (of_all,) * 4, "qwen2": (of_all,) * 2 + (beside_a_half,) * 2,
        "llama4_text": (beside_a_quarter,) * 3 + (of_all,), "gemma4_text": (beside_a_half, of_all),
    }[name]  # fmt: skip
    assert engine.info.num_blocks == tuple(dict.fromkeys(layers))
    heads, head_dim, float32 = 2, 8, 4
    assert engine.info.kv_bytes == sum(layers) * 8 * 2 * heads * head_dim * float32
    assert engine.info.ledger is not None
    planned = {line.name: line.planned_bytes for line in engine.info.ledger.lines}
    assert planned["KV pool"] == engine.info.kv_bytes
    engine.core.close()


def test_the_cache_takes_what_states_need(references: References) -> None:
    """Of a token what the convolution and the delta rule read again, of a block a state for each head."""
    engine = start(references("qwen3_5_text"), "scheduler.max_requests=2")
    of_all, of_states = 2 * 256 // 8 + 1, 2 * 4 + -(-(48 + 1) // 8) + 1
    assert engine.info.num_blocks == (of_states, of_all)
    keys, values, heads = 2 * 8, 4 * 12, 4
    state = 8 * (2 * keys + values) + 8 * (keys + values + heads) + heads * 8 * 12
    attention = 8 * 2 * 2 * 16
    assert engine.info.kv_bytes == 4 * 2 * (of_states * state + of_all * attention)
    engine.core.close()


@few(2)
@needs_compiler
@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        ("qwen2", "early_exit"),
        ("qwen2", "draft_model"),
        ("mistral", "draft_model"),
        ("deepseek_v2", "early_exit"),
        ("deepseek_v2", "draft_model"),
        ("qwen3_5_text", "early_exit"),
        ("qwen3_5_text", "draft_model"),
        ("llama4_text", "early_exit"),
        ("gemma4_text", "early_exit"),
        ("gemma4_text", "draft_model"),
        pytest.param("llama4_text", "draft_model", marks=pytest.mark.slow),
        pytest.param("mistral", "early_exit", marks=pytest.mark.slow),
        pytest.param("qwen2", "ngram", marks=pytest.mark.slow),
    ],
)
def test_drafts_change_no_token(references: References, name: str, drafter: str) -> None:
    reference = references(name)
    options = [option.format(path=reference.path) for option in DRAFTERS[drafter]]
    engine = start(reference, "kv_allocator=prefix_cache", *options)
    first, _ = reference.check(engine.core)
    accepted = sum(answer.timings.accepted_tokens for answer in first if answer.timings is not None)
    assert accepted, "drafts were verified"
    engine.core.close()


@few(1)
@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        ("qwen2", "early_exit"),
        ("mistral", "draft_model"),
        ("qwen3_5_text", "early_exit"),
        ("llama4_text", "early_exit"),
        ("gemma4_text", "early_exit"),
    ],
)
def test_captured_steps_and_drafts_have_the_tables_of_each_group(
    references: References, name: str, drafter: str
) -> None:
    """In a cache of NaN: what reads a block that is not its group's, or that the window has passed, shows."""
    reference = references(name)
    options = [option.format(path=reference.path) for option in DRAFTERS[drafter]]
    made = capturing_engine(
        f"model.path={reference.path}", "model.max_len=256", "kv_allocator=prefix_cache", "drafter.max_width=2",
        *ROOM, *options, row_shapes=(4,), query_shapes=(1, 3),
    )  # fmt: skip
    short = Reference(reference.path, reference.prompts[1:5], reference.tokens[1:5])
    short.check(made.core, batch=4)
