"""A fault in a step is that of the requests it belongs to: they fail alone, and the engine goes on unless it cannot."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.contracts.drafter import Draft, DraftRow
from engine.contracts.request import EngineRequest, SamplingParams
from engine.loop.core import PROBE, EngineBroken
from engine.plugin_guard.calls import name_of, noting
from engine.step import runner
from tests import exact_model

from .harness import VOCAB, Exact, assert_nothing_held, exact_engine, expected, random_requests, run, settle

NAN, DRAFTER, MEMORY, FORWARD = 93, 94, 95, 96
"""Tokens that bring a fault where they are: as the next token, in a text, in a batch."""
SAMPLING = 666
"""A seed that does."""
FAULTS = {
    "forward": "RuntimeError: no kernel", "memory": "OutOfMemoryError: out of memory", "nan": "not finite numbers",
    "sampling": "ValueError: no such noise", "drafter": "propose() raised KeyError",
}  # fmt: skip
HOST = ("drafter=ngram", "drafter.adaptive=false")
SETS = [("overlap=false", "drafter=none"), ("overlap=true", *HOST)]


def faulty_engine(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Exact:
    engine = exact_engine(*overrides, kv_tokens=8192)
    head, forward, choose = engine.model.head, engine.model.run, runner.choose_tokens

    def faulty_run(batch: Any, *args: Any) -> Any:
        if bool((batch.token_ids == FORWARD).any()):
            raise RuntimeError("no kernel")
        if bool((batch.token_ids == MEMORY).any()):
            raise torch.OutOfMemoryError("out of memory")
        return forward(batch, *args)

    def faulty_head(hidden: Tensor) -> Tensor:
        return torch.where(hidden == NAN, float("nan"), head(hidden))

    def faulty_choice(logits: Tensor, batch: Any, *args: Any) -> Any:
        if bool((batch.seeds == SAMPLING).any()):
            raise ValueError("no such noise")
        return choose(logits, batch, *args)

    monkeypatch.setattr(engine.model, "run", faulty_run)
    monkeypatch.setattr(engine.model, "head", faulty_head)
    monkeypatch.setattr(runner, "choose_tokens", faulty_choice)
    return engine


def with_propose(engine: Exact, propose: Callable[[Callable[..., Draft], Sequence[DraftRow]], Any]) -> None:
    """Put a function before the drafter on the host."""
    drafter: Any = engine.core._drafting._host
    original = drafter.propose
    drafter.propose = noting(lambda rows: propose(original, rows), f"{name_of(drafter)}: propose()")


def faulty_propose(original: Callable[..., Draft], rows: Sequence[DraftRow]) -> Draft:
    if any(DRAFTER in row.tokens for row in rows):
        raise KeyError("a text it has not seen")
    return original(rows)


def request(name: str, fault: str | None, rng: random.Random) -> EngineRequest:
    """One with this fault and no other: what it says is known beforehand."""
    marks = {"forward": FORWARD, "memory": MEMORY, "drafter": DRAFTER}
    while True:
        prompt = [rng.randrange(NAN) for _ in range(rng.randint(3, 20))]
        if fault in marks:
            prompt[rng.randrange(len(prompt))] = marks[fault]
        seed = SAMPLING if fault == "sampling" else None
        params = SamplingParams(max_tokens=rng.randint(4, 10), temperature=0.0, seed=seed)
        found = EngineRequest(name, tuple(prompt), params)
        said = set(expected(found))
        if fault == "nan" and NAN in said and max(said) == NAN:
            return found
        if fault != "nan" and not said & ({NAN, DRAFTER, MEMORY, FORWARD} - {marks.get(fault or "", -1)}):
            return found


def serve(engine: Exact, requests: Sequence[EngineRequest]) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Outputs of those that were answered, and the errors of the others."""
    errors: dict[str, str] = {}
    step = engine.core.step

    def watched() -> Any:
        found = step()
        errors.update({out.request_id: out.error for out in found.outputs if out.finish_reason == "error"})
        return found

    engine.core.step = watched  # type: ignore[method-assign]
    try:
        outputs = run(engine.core, requests, per_step=4)
    finally:
        engine.core.step = step  # type: ignore[method-assign]
    return {name: tokens for name, tokens in outputs.items() if name not in errors}, errors


@pytest.mark.parametrize(
    ("many", "overrides"),
    [(200, SETS[1]), *(pytest.param(1000, overrides, marks=pytest.mark.slow) for overrides in SETS)],
)
def test_a_fault_in_every_tenth_request_fails_every_tenth_request(
    many: int, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, rng = faulty_engine(monkeypatch, *overrides), random.Random(5)
    kinds = [kind for kind in FAULTS if kind != "drafter"]
    if "drafter=ngram" in overrides:
        with_propose(engine, faulty_propose)
        kinds.append("drafter")
    guilty = {f"r{number}": kinds[i % len(kinds)] for i, number in enumerate(rng.sample(range(many), many // 10))}
    requests = [request(f"r{i}", guilty.get(f"r{i}"), rng) for i in range(many)]
    outputs, errors = serve(engine, requests)
    assert set(errors) == set(guilty)
    assert all(FAULTS[guilty[name]] in error for name, error in errors.items())
    assert outputs == {r.request_id: expected(r) for r in requests if r.request_id not in guilty}
    assert_nothing_held(engine)
    engine.core.close()


@pytest.mark.parametrize("together", [1, 12])
@pytest.mark.parametrize("overlap", ["true", "false"])
def test_running_out_of_memory_twenty_times_fails_at_most_a_request_each(
    overlap: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is alone when memory is short fails; of several, each has another try."""
    engine, rng = exact_engine(f"overlap={overlap}", "drafter=none"), random.Random(6)
    forward, steps_left = engine.model.run, [0]

    def scarce(*args: Any) -> Any:
        steps_left[0] -= 1
        if steps_left[0] == 0:
            raise torch.OutOfMemoryError("out of memory")
        return forward(*args)

    monkeypatch.setattr(engine.model, "run", scarce)
    for wave in range(20):
        requests = [request(f"{wave}-{i}", None, rng) for i in range(together)]
        steps_left[0] = rng.randint(1, 4)
        outputs, errors = serve(engine, requests)
        assert steps_left[0] <= 0 and len(errors) <= (together == 1)
        assert outputs == {r.request_id: expected(r) for r in requests if r.request_id not in errors}
    assert_nothing_held(engine)
    engine.core.close()


def test_requests_that_fail_one_after_another_do_not_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does anybody hear of the engine's own requests."""
    engine, rng = faulty_engine(monkeypatch, "overlap=true", "drafter=none"), random.Random(7)
    for i in range(20):
        outputs, errors = serve(engine, [request(f"r{i}", rng.choice(("forward", "memory", "nan")), rng)])
        assert outputs == {} and list(errors) == [f"r{i}"]
    assert serve(engine, [innocent := request("innocent", None, rng)])[0] == {"innocent": expected(innocent)}
    assert_nothing_held(engine)
    engine.core.close()


@pytest.mark.parametrize("overlap", ["true", "false"])
def test_what_a_broken_request_left_in_the_cache_is_not_used_again(
    overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys were wrong in a chunk that sampled nothing, so that its blocks could be found before anybody noticed."""
    settings = (f"overlap={overlap}", "drafter=none", "kv_allocator=prefix_cache", "scheduler.token_budget=16")
    engine, original = exact_engine(*settings), exact_model.next_token
    prompt, params = tuple(range(60)), SamplingParams(max_tokens=5, temperature=0.0)
    assert NAN not in expected(EngineRequest("", prompt, params))
    monkeypatch.setattr(
        exact_model, "next_token", lambda tokens, size: NAN if max(tokens) >= VOCAB else original(tokens, size)
    )
    head, forward, fault = engine.model.head, engine.model.run, [True]

    def faulty_run(batch: Any, kv: Any, *args: Any) -> Any:
        found = forward(batch, kv, *args)
        if fault and fault.pop():
            kv.tokens.view(-1)[batch.slot_mappings[0]] = VOCAB
        return found

    monkeypatch.setattr(engine.model, "run", faulty_run)
    monkeypatch.setattr(engine.model, "head", lambda hidden: torch.where(hidden == NAN, float("nan"), head(hidden)))
    assert list(serve(engine, [EngineRequest("bad", prompt, params)])[1]) == ["bad"]
    again = EngineRequest("again", prompt, params)
    assert serve(engine, [again]) == ({"again": expected(again)}, {})
    assert_nothing_held(engine)
    engine.core.close()


@pytest.mark.parametrize("overlap", ["true", "false"])
def test_prefixes_forgotten_in_the_midst_of_requests_change_no_token(overlap: str) -> None:
    engine = exact_engine(f"overlap={overlap}", "drafter=ngram", "kv_allocator=prefix_cache", kv_tokens=1024)
    step, rng = engine.core.step, random.Random(9)

    def forgetful() -> Any:
        if rng.random() < 0.3:
            engine.core.reset_prefix_cache()
        return step()

    engine.core.step = forgetful  # type: ignore[method-assign]
    requests = random_requests(10, 40)
    assert run(engine.core, requests) == {r.request_id: expected(r) for r in requests}
    assert_nothing_held(engine)
    engine.core.close()


def raising(*args: Any) -> Any:
    raise RuntimeError("no kernel")


def all_nan(hidden: Tensor) -> Tensor:
    return torch.full((len(hidden), NAN), float("nan"))


def no_answer(original: Callable[..., Draft], rows: Sequence[DraftRow]) -> Any:
    return None


def too_many(original: Callable[..., Draft], rows: Sequence[DraftRow]) -> Draft:
    return Draft(tuple((1,) * (row.num_draft_tokens + 1) for row in rows))


@pytest.mark.parametrize(
    ("part", "broken", "words"),
    [
        ("run", raising, "RuntimeError: no kernel"),
        ("head", all_nan, "not finite numbers"),
        ("drafter", no_answer, r"drafter=ngram .*propose\(\) returned None, expected a Draft"),
        ("drafter", too_many, r"drafter=ngram .*propose\(\) proposed"),
    ],
)
def test_an_engine_that_fails_on_everything_ends_with_the_reason(
    part: str, broken: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, rng = exact_engine("overlap=true", *HOST), random.Random(8)
    if part == "drafter":
        with_propose(engine, broken)
    else:
        monkeypatch.setattr(engine.model, part, broken)
    with pytest.raises(EngineBroken, match=words):
        serve(engine, [request(f"r{i}", None, rng) for i in range(20)])
    engine.core.close()


def test_the_engines_own_request_comes_first_and_is_not_refused() -> None:
    engine = exact_engine("overlap=false", "drafter=none", max_len=16)
    engine.core.submit(PROBE)
    settle(engine.core)
    assert_nothing_held(engine)
    engine.core.close()
