"""What the grammar of an output forces to come next."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from engine.contracts.constraint import Grammar, GrammarError
from engine.contracts.request import EngineRequest, SamplingParams
from engine.loop.forcing import MOST_S, Forcing
from tests.laws.harness import VOCAB, exact_engine


class Counting:
    """After ``n`` comes ``n + 1``, up to 9. Any token is allowed."""

    def __init__(
        self, forces: Sequence[int] | None = None, slow_s: float = 0.0, raises: Exception | None = None
    ) -> None:
        self.taken: list[int] = []
        self._raises = raises
        self._forces, self._slow_s = forces, slow_s

    def advance(self, token: int) -> bool:
        self.taken.append(token)
        return token < 50

    def roll_back(self, count: int) -> None:
        raise AssertionError("nothing is taken back")

    def fill(self, mask: Tensor) -> None:
        raise AssertionError("no mask is wanted")

    def forced(self) -> Sequence[int]:
        if self._raises is not None:
            raise self._raises
        begun_s = time.thread_time()
        while time.thread_time() - begun_s < self._slow_s:
            pass
        return range(self.taken[-1] + 1, 10) if self._forces is None else self._forces


def test_the_matcher_takes_each_token_once() -> None:
    matcher = Counting()
    forcing = Forcing(matcher)
    assert list(forcing.after([1, 1, 7], 2)) == [8, 9]
    assert list(forcing.after([1, 1, 7, 8, 3], 2)) == [4, 5, 6, 7, 8, 9]
    assert matcher.taken == [7, 8, 3]


def test_nothing_is_forced_once_a_matcher_cannot_go_on() -> None:
    forbidden = Forcing(Counting())
    assert list(forbidden.after([60], 0)) == [] and list(forbidden.after([60, 1], 0)) == []
    limited = Forcing(Counting(raises=GrammarError("too hard")))
    assert list(limited.after([1], 0)) == [] and limited.matcher is None
    assert list(Forcing(None).after([1], 0)) == []


def test_a_matcher_that_is_slow_is_not_asked_again() -> None:
    forcing = Forcing(Counting(slow_s=2 * MOST_S))
    assert list(forcing.after([8], 0)) == [9] and list(forcing.after([8], 0)) == []


def outputs_with(
    forces: Sequence[int], raises: Exception | None = None
) -> tuple[dict[str, list[int]], list[str], int, int]:
    """Outputs, errors, and drafts verified and accepted, where an n-gram drafter drafts."""
    overrides = ("drafter=ngram", "drafter.adaptive=false")
    engine = exact_engine(*overrides, matcher_of=lambda sampling, stop_ids: Counting(forces, raises=raises))
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    requests = [
        EngineRequest("plain", (1, 2, 3), sampling),
        EngineRequest("forced", (4, 5, 6), SamplingParams(max_tokens=12, temperature=0.0, grammar=Grammar("regex"))),
    ]
    for request in requests:
        engine.core.submit(request)
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    errors, drafted, accepted = [], 0, 0
    while engine.core.has_work:
        for out in engine.core.step().outputs:
            outputs[out.request_id] += out.tokens
            errors += [out.error] * bool(out.error)
            if out.timings is not None and out.request_id == "forced":
                drafted, accepted = out.timings.drafted_tokens, out.timings.accepted_tokens
    engine.core.close()
    return outputs, errors, drafted, accepted


def test_forced_tokens_are_drafts_and_change_no_output() -> None:
    """Here nothing masks: what is forced is as good as any draft."""
    nothing, wrong = outputs_with(()), outputs_with((VOCAB - 1, VOCAB - 1))
    assert nothing[0] == wrong[0] and nothing[1] == wrong[1] == []
    assert wrong[2] > nothing[2]


def test_a_forced_token_that_is_none_ends_its_own_request() -> None:
    outputs, errors, _, _ = outputs_with((VOCAB,))
    assert len(errors) == 1 and "forced tokens" in errors[0] and str(VOCAB) in errors[0]
    assert len(outputs["plain"]) == 12 and len(outputs["forced"]) < 12


def test_a_matcher_that_fails_ends_its_own_request_with_its_reason() -> None:
    outputs, errors, _, _ = outputs_with((), ZeroDivisionError("by zero"))
    assert len(errors) == 1 and "ZeroDivisionError" in errors[0]
    assert len(outputs["plain"]) == 12 and len(outputs["forced"]) < 12


class Asked(Counting):
    """Notes each question."""

    questions: list[int]

    def forced(self) -> Sequence[int]:
        self.questions.append(len(self.taken))
        super().forced()
        return ()


def test_a_step_asks_no_more_grammars_once_some_took_as_long_as_one_may() -> None:
    questions: list[int] = []

    def matcher_of(sampling: SamplingParams, stop_ids: Sequence[int]) -> Asked:
        matcher = Asked((), slow_s=0.6 * MOST_S)
        matcher.questions = questions
        return matcher

    engine = exact_engine("drafter=ngram", "drafter.adaptive=false", matcher_of=matcher_of)
    sampling = SamplingParams(max_tokens=8, temperature=0.0, grammar=Grammar("regex"))
    for number in range(6):
        engine.core.submit(EngineRequest(f"r{number}", (4, 5, 6 + number), sampling))
    in_steps: list[int] = []
    while engine.core.has_work:
        before = len(questions)
        engine.core.step()
        in_steps.append(len(questions) - before)
    engine.core.close()
    assert max(in_steps) in (1, 2), "of 6 requests"
