"""Law 1 with the bundled model in float32: whatever is swapped in that claims to be lossless, the tokens are equal.

The reference is the ``baseline`` preset, one request at a time. ``-m slow`` runs the full product.
"""

from __future__ import annotations

import inspect
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine import LLM
from engine.service.parsing import parse_messages
from tests.families import model_facts
from tests.selection import few

COMMON = ("device=cpu", "model.max_len=1024", "exporter=[]", "scheduler.max_requests=16")
SETS = {
    "latency": ("+preset=latency",),
    "throughput": ("+preset=throughput",),
    "balanced": ("+preset=balanced",),
    "latency without overlap": ("+preset=latency", "overlap=false"),
    "tiny chunks": ("scheduler=chunked_prefill", "scheduler.token_budget=40", "kv_allocator=prefix_cache"),
    "always drafting": ("+preset=latency", "drafter=ngram", "drafter.adaptive=false", "drafter.max_width=6"),
    "preempted": ("scheduler=continuous", "kv_allocator=paged", "drafter=ngram", "memory.kv_tokens=640"),
    "static batches": ("scheduler=static", "kv_allocator=contiguous", "drafter=none", "overlap=true"),
}
Outputs = list[tuple[int, ...]]


def prompts(llm: LLM, count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Questions the model was trained on, source text of 1 to 700 tokens, and text after a shared beginning."""
    rng = random.Random(seed)
    names = list(json.loads(recall_file().read_text())["first_sentences"])
    text = llm.tokenizer.encode_now(inspect.getsource(json) + inspect.getsource(random) + inspect.getsource(inspect))
    shared = text[:200]
    made: list[tuple[int, ...]] = []
    for i in range(count):
        start, length = rng.randrange(len(text) - 800), rng.choice((1, 5, 16, 60, 200, 600))
        if i % 3 == 0:
            question = {"role": "user", "content": f"What does {rng.choice(names)} do?"}
            made.append(llm.tokenizer.encode_chat_now(parse_messages([question])))
        elif i % 3 == 1:
            made.append(text[start : start + length])
        else:
            made.append(shared + text[start : start + min(length, 60)])
    return made


def recall_file() -> Path:
    return Path(model_facts("bundled").path) / "recall.json"


@pytest.fixture(scope="module")
def engines() -> Iterator[Callable[..., LLM]]:
    """Engines by overrides, built once."""
    built: dict[tuple[str, ...], LLM] = {}

    def get(*overrides: str) -> LLM:
        if overrides not in built:
            built[overrides] = LLM("bundled", overrides=[*COMMON, *overrides])
        return built[overrides]

    yield get
    for llm in built.values():
        llm.close()


@pytest.fixture(scope="module")
def reference(engines: Callable[..., LLM]) -> Callable[..., Outputs]:
    known: dict[str, Outputs] = {}

    def outputs(count: int, **sampling: object) -> Outputs:
        key = repr((count, sampling))
        if key not in known:
            llm = engines("+preset=baseline")
            known[key] = [llm.generate([p], **sampling)[0].tokens for p in prompts(llm, count)]
        return known[key]

    return outputs


def differences(a: Outputs, b: Outputs) -> int:
    return sum(x != y for x, y in zip(a, b, strict=True))


def assert_idle(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats.blocks_leased, stats.rows_used) == (0, 0)
    assert all(blocks.free + blocks.cached == blocks.total for blocks in stats.blocks)


@few(2)
@pytest.mark.parametrize("name", SETS)
def test_greedy_tokens_are_those_of_the_baseline(
    name: str, engines: Callable[..., LLM], reference: Callable[..., Outputs]
) -> None:
    llm = engines(*SETS[name])
    sampling = {"max_tokens": 16, "temperature": 0.0}
    for _ in range(2):  # the second time, prefixes are cached where there is a cache
        done = llm.generate(prompts(llm, 6), **sampling)
        assert differences([c.tokens for c in done], reference(6, **sampling)) == 0
    assert_idle(llm)


@few(1)
@pytest.mark.parametrize("name", SETS)
def test_a_seed_gives_one_output_whatever_the_batch_and_the_drafter(
    name: str, engines: Callable[..., LLM], reference: Callable[..., Outputs]
) -> None:
    llm = engines(*SETS[name])
    sampling = {"max_tokens": 16, "temperature": 0.9, "top_p": 0.95, "seed": 1234, "ignore_eos": True}
    done = llm.generate(prompts(llm, 6), **sampling)
    assert differences([c.tokens for c in done], reference(6, **sampling)) == 0
    assert_idle(llm)


@pytest.mark.parametrize("caching", ["balanced", pytest.param("latency", marks=pytest.mark.slow)])
def test_the_sets_exercise_what_they_claim(engines: Callable[..., LLM], caching: str) -> None:
    """Prefix hits and accepted drafts really happen in the sets above; adaptive ones draft where that pays here."""

    def totals(name: str) -> tuple[int, int]:
        llm = engines(*SETS[name])
        first, again = (llm.generate(prompts(llm, 9), max_tokens=24, temperature=0.0) for _ in range(2))
        done = [c.timings for c in (*first, *again)]
        return (
            sum(t.cached_tokens for t in done if t),
            sum(t.accepted_tokens for t in done if t),
        )

    assert totals(caching)[0] > 0
    assert totals("always drafting")[1] > 0


def test_preempted_requests_continue_with_the_same_tokens(engines: Callable[..., LLM]) -> None:
    """Eight requests that grow beyond the pool."""
    sampling = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    roomy, tight = engines("+preset=baseline"), engines(*SETS["preempted"])
    short = [p[:64] for p in prompts(roomy, 18) if len(p) >= 64][:8]
    assert len(short) == 8
    done = tight.generate(short, **sampling)
    assert sum(c.timings.preemptions for c in done if c.timings) > 0
    assert [c.tokens for c in done] == [roomy.generate([p], **sampling)[0].tokens for p in short]
    assert_idle(tight)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plugins",
    list(
        itertools.product(
            ("static", "continuous", "chunked_prefill"),
            ("contiguous", "paged", "prefix_cache"),
            ("none", "ngram"),
            ("true", "false"),
            ("40", "2048"),
        )
    ),
    ids="-".join,
)
def test_the_full_product_of_lossless_plugins(plugins: tuple[str, ...], reference: Callable[..., Outputs]) -> None:
    scheduler, allocator, drafter, overlap, budget = plugins
    llm = LLM(
        "bundled",
        overrides=[
            *COMMON,
            f"scheduler={scheduler}",
            f"kv_allocator={allocator}",
            f"drafter={drafter}",
            f"overlap={overlap}",
            f"scheduler.token_budget={budget}",
        ],
    )
    sampling = {"max_tokens": 24, "temperature": 0.0}
    done = llm.generate(prompts(llm, 60), **sampling)
    assert differences([c.tokens for c in done], reference(60, **sampling)) == 0
    assert_idle(llm)
    llm.close()
