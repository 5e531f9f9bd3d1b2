"""Laws 1 and 2 over plugin sets, with a model whose every output is known: swaps change nothing, nothing leaks.

Every two plugins meet in a set here; ``-m slow`` runs all sets.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.contracts.request import EngineRequest, SamplingParams
from engine.loop.core import EngineBroken
from engine.step.plan import StepPlan

from .drafted import pairwise
from .harness import VOCAB, assert_nothing_held, exact_engine, expected, random_requests, run, settle

SCHEDULERS = ("static", "continuous", "chunked_prefill")
ALLOCATORS = ("contiguous", "paged", "prefix_cache")
DRAFTERS = ("none", "ngram", "suffix")
OVERLAP = ("true", "false")
STEPS = ("eager", "captured")
FACTORS = (SCHEDULERS, ALLOCATORS, DRAFTERS, OVERLAP, STEPS)
Plugins = tuple[str, ...]


def sets(*factors: tuple[str, ...]) -> list[Any]:
    """Parameters: every set, marked slow where others have its pairs."""
    chosen = pairwise(factors)
    return [
        pytest.param(plugins, marks=[] if plugins in chosen else pytest.mark.slow, id="-".join(plugins))
        for plugins in itertools.product(*factors)
    ]


def overrides(plugins: Plugins) -> list[str]:
    scheduler, allocator, drafter, overlap, _ = plugins
    return [
        f"scheduler={scheduler}",
        f"kv_allocator={allocator}",
        f"drafter={drafter}",
        f"overlap={overlap}",
        "scheduler.token_budget=40",
        "scheduler.max_requests=6",
    ]


@pytest.mark.parametrize("plugins", sets(*FACTORS))
def test_every_plugin_set_computes_the_same_tokens_and_gives_everything_back(plugins: Plugins) -> None:
    engine = exact_engine(*overrides(plugins), graphs=plugins[4] == "captured")
    for seed in (1, 2):
        requests = random_requests(seed, 10)
        outputs = run(engine.core, requests)
        assert outputs == {r.request_id: expected(r) for r in requests}
        assert_nothing_held(engine)
    engine.core.close()


@pytest.mark.parametrize("plugins", sets(SCHEDULERS, ("paged", "prefix_cache"), *FACTORS[2:]))
def test_preemption_under_memory_pressure_changes_no_token(plugins: Plugins) -> None:
    engine = exact_engine(*overrides(plugins), kv_tokens=160, max_len=128, graphs=plugins[4] == "captured")
    requests = random_requests(3, 12)
    outputs = run(engine.core, requests, per_step=16)
    assert outputs == {r.request_id: expected(r) for r in requests}
    assert_nothing_held(engine)
    engine.core.close()


def test_memory_pressure_does_preempt() -> None:
    engine = exact_engine("scheduler=continuous", "kv_allocator=paged", "drafter=none", kv_tokens=96, max_len=96)
    requests = [
        EngineRequest(f"r{i}", tuple(range(i, i + 20)), SamplingParams(max_tokens=40, temperature=0.0))
        for i in range(4)
    ]
    preemptions = 0
    for request in requests:
        engine.core.submit(request)
    outputs: dict[str, list[int]] = {r.request_id: [] for r in requests}
    while engine.core.has_work:
        for out in engine.core.step().outputs:
            outputs[out.request_id].extend(out.tokens)
            preemptions += out.timings.preemptions if out.timings else 0
    assert preemptions > 0
    assert outputs == {r.request_id: expected(r) for r in requests}


@pytest.mark.parametrize("plugins", sets(*FACTORS))
def test_aborts_at_random_moments_leak_nothing_and_disturb_nobody(plugins: Plugins) -> None:
    engine = exact_engine(*overrides(plugins), kv_tokens=512, graphs=plugins[4] == "captured")
    rng = random.Random(5)
    requests = random_requests(6, 20, longest=40)
    outputs: dict[str, list[int]] = {r.request_id: [] for r in requests}
    aborted: set[str] = set()
    for request in requests:
        engine.core.submit(request)
    while engine.core.has_work:
        if rng.random() < 0.4:
            victim = rng.choice(requests).request_id
            engine.core.abort([victim])
        for out in engine.core.step().outputs:
            outputs[out.request_id].extend(out.tokens)
            if out.finish_reason == "abort":
                aborted.add(out.request_id)
    assert aborted and len(aborted) < len(requests)
    for request in requests:
        if request.request_id in aborted:
            assert outputs[request.request_id] == expected(request)[: len(outputs[request.request_id])]
        else:
            assert outputs[request.request_id] == expected(request)
    assert_nothing_held(engine)
    engine.core.close()


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("overlap", OVERLAP)
def test_a_stop_found_late_leaves_no_trace_in_the_row_that_is_reused(overlap: str, steps: str) -> None:
    """EOS shows up while the next step is already running; a longer prompt then takes over the row at once."""
    one_row = ("drafter=none", "scheduler=continuous", "scheduler.max_requests=1")
    engine = exact_engine(f"overlap={overlap}", *one_row, graphs=steps == "captured")
    short = EngineRequest("short", (3, 4, 5), SamplingParams(max_tokens=50, temperature=0.0))
    output = expected(short)
    stop = output[4]
    first = output.index(stop)
    short = EngineRequest("short", short.prompt, SamplingParams(max_tokens=50, temperature=0.0, stop_token_ids=(stop,)))
    long = EngineRequest("long", tuple(range(80)), SamplingParams(max_tokens=10, temperature=0.0))
    outputs = run(engine.core, [short, long])
    assert outputs["short"] == output[: first + 1]
    assert outputs["long"] == expected(long)
    assert_nothing_held(engine)
    engine.core.close()


@pytest.mark.parametrize("overlap", OVERLAP)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_request_that_breaks_the_device_fails_alone(overlap: str, drafter: str) -> None:
    guilty_token = VOCAB - 1
    engine = exact_engine(f"overlap={overlap}", f"drafter={drafter}", fail_on=guilty_token)
    requests = random_requests(8, 6)
    bad = EngineRequest("bad", (1, 2, guilty_token, 4), SamplingParams(max_tokens=4, temperature=0.0))
    outputs: dict[str, list[int]] = {r.request_id: [] for r in requests}
    errors = {}
    for request in (*requests[:3], bad, *requests[3:]):
        engine.core.submit(request)
    while engine.core.has_work:
        for out in engine.core.step().outputs:
            if out.finish_reason == "error":
                errors[out.request_id] = out.error
            else:
                outputs[out.request_id].extend(out.tokens)
    assert list(errors) == ["bad"] and str(guilty_token) in errors["bad"]
    innocent = [r for r in requests if guilty_token not in expected(r)]
    assert innocent
    for request in innocent:
        assert outputs[request.request_id] == expected(request)
    assert_nothing_held(engine)
    engine.core.close()


@pytest.mark.parametrize("overlap", OVERLAP)
def test_tables_that_could_not_be_written_end_the_engine(overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an admission must not be run on: the row still holds the text of whoever had it before."""
    engine = exact_engine(f"overlap={overlap}", "drafter=none")
    run(engine.core, random_requests(1, 4))
    apply, calls = engine.runner.tables.apply, []

    def fail_once(plan: StepPlan) -> None:
        calls.append(plan)
        if len(calls) == 1:
            raise MemoryError("no pinned memory")
        apply(plan)

    monkeypatch.setattr(engine.runner.tables, "apply", fail_once)
    for request in random_requests(2, 2):
        engine.core.submit(request)
    with pytest.raises(EngineBroken, match="no pinned memory"):
        while engine.core.has_work:
            assert not any(out.tokens for out in engine.core.step().outputs)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("overlap", OVERLAP)
def test_a_row_without_finite_logits_fails_alone_and_the_next_step_still_runs(
    overlap: str, steps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = exact_engine(f"overlap={overlap}", "drafter=none", graphs=steps == "captured")
    bad = EngineRequest("bad", (1, 2, 3), SamplingParams(max_tokens=6, temperature=0.0))
    poison = expected(bad)[0]
    innocent = [r for r in random_requests(9, 12) if poison not in expected(r)]
    head, forward, raised = engine.model.head, engine.model.run, []

    def poisoned_head(hidden: Tensor) -> Tensor:
        return torch.where(hidden == poison, float("nan"), head(hidden))

    def watched_run(*arguments: Any) -> Any:
        try:
            return forward(*arguments)
        except Exception as error:
            raised.append(error)
            raise

    monkeypatch.setattr(engine.model, "head", poisoned_head)
    monkeypatch.setattr(engine.model, "run", watched_run)
    outputs = run(engine.core, [*innocent[:2], bad, *innocent[2:]])
    assert outputs["bad"] == [] and raised == []
    assert innocent and all(outputs[r.request_id] == expected(r) for r in innocent)
    assert_nothing_held(engine)
    engine.core.close()


def test_repeated_prompts_hit_the_prefix_cache_and_salts_keep_apart() -> None:
    engine = exact_engine("kv_allocator=prefix_cache", "drafter=none")
    prompt = tuple(range(64))

    def cached(request_id: str, salt: str) -> int:
        params = SamplingParams(max_tokens=3, temperature=0.0)
        engine.core.submit(EngineRequest(request_id, prompt, params, cache_salt=salt))
        timings = None
        while engine.core.has_work:
            for out in engine.core.step().outputs:
                timings = out.timings or timings
        assert timings is not None
        return timings.cached_tokens

    assert cached("cold", "") == 0
    assert cached("warm", "") == 63  # the last token must be computed
    assert cached("other tenant", "salt") == 0
    settle(engine.core)
    engine.core.reset_prefix_cache()
    assert cached("after reset", "") == 0
    engine.core.close()


def test_drafts_are_accepted_and_change_no_token() -> None:
    engine = exact_engine("drafter=ngram", "drafter.adaptive=false", "overlap=true")
    requests = [
        EngineRequest(f"r{i}", tuple([1, 2, 3, 4, 5] * 4 + [i]), SamplingParams(max_tokens=60, temperature=0.0))
        for i in range(3)
    ]
    accepted = 0
    outputs: dict[str, list[int]] = {r.request_id: [] for r in requests}
    for request in requests:
        engine.core.submit(request)
    while engine.core.has_work:
        for out in engine.core.step().outputs:
            outputs[out.request_id].extend(out.tokens)
            accepted += out.timings.accepted_tokens if out.timings else 0
    assert accepted > 30
    assert outputs == {r.request_id: expected(r) for r in requests}
    engine.core.close()


def test_requests_that_cannot_run_are_answered_with_an_error() -> None:
    engine = exact_engine(kv_tokens=64, max_len=64)
    engine.core.submit(EngineRequest("empty", ()))
    engine.core.submit(EngineRequest("long", tuple(range(64))))
    errors = {out.request_id: out.error for out in engine.core.step().outputs}
    assert errors == {"empty": "the prompt is empty", "long": "the prompt has 64 tokens, at most 63 fit"}
    engine.core.close()
