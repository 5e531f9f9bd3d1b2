"""Models of every kind of KV group: whatever happens to requests, their tokens are those of transformers, and no group
holds more blocks than its queries see."""

from __future__ import annotations

import pytest

from tests.selection import few

from ..needs import needs_compiler
from ..step.capturing import capturing_engine
from .kv_models import DRAFTERS, FAMILIES, LENGTHS, OUTPUT, ROOM, WINDOW, WINDOWS, Reference, References, start
from .kv_models import references as references


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
    engine = start(reference, "memory.kv_tokens=64", "kv_allocator=prefix_cache", "scheduler.token_budget=16")
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
