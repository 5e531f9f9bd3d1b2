"""What a request and a step say of their drafts."""

import pytest

from engine.contracts.events import StepEvent
from engine.contracts.request import EngineRequest, SamplingParams
from engine.loop.drafting import Drafted
from tests.laws.harness import exact_engine

REPEATED = tuple([5, 6, 7, 8] * 6)
FIXED = ("drafter.adaptive=false", "drafter.max_width=3")


def served(*overrides, requests=2, tokens=24):
    """The engine's step events and its requests' timings."""
    engine = exact_engine(*overrides)
    for i in range(requests):
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
        engine.core.submit(EngineRequest(f"r{i}", (*REPEATED, 9 + i, *REPEATED), sampling))
    events, timings = [], []
    while engine.core.has_work:
        out = engine.core.step()
        events += [event for event in out.events if isinstance(event, StepEvent)]
        timings += [output.timings for output in out.outputs if output.timings is not None]
    engine.core.close()
    return events, timings


def test_a_draft_is_tried_once_all_before_it_were_accepted():
    drafted = Drafted()
    for num_drafts, accepted in ((3, 0), (3, 3), (2, 1)):
        drafted.add(3, num_drafts, accepted)
    assert (drafted.tried, drafted.accepted_at) == ([3, 2, 1], [2, 1, 1])
    assert (drafted.chains, drafted.drafted, drafted.accepted) == (3, 8, 4)


@pytest.mark.parametrize("overlap", ["true", "false"])
def test_steps_and_requests_count_the_same_drafts(overlap):
    events, timings = served("drafter=ngram", *FIXED, f"overlap={overlap}")
    for by_step, by_request in (
        ([e.drafted for e in events], [t.drafted_tokens for t in timings]),
        ([e.accepted for e in events], [t.accepted_tokens for t in timings]),
        ([e.draft_chains for e in events], [t.draft_chains for t in timings]),
    ):
        assert sum(by_step) == sum(by_request) > 0
    for event in events:
        assert sum(event.drafts_accepted) == event.accepted and max(event.drafts_tried, default=0) == event.draft_chains
        assert len(event.drafts_accepted) <= len(event.drafts_tried) <= 3


@pytest.mark.parametrize("drafter", ["ngram", "none"])
def test_rounds_are_the_steps_after_the_first_token(drafter):
    _, timings = served(f"drafter={drafter}", *(FIXED if drafter == "ngram" else ()))
    for found in timings:
        assert found.draft_chains <= found.decode_steps <= 23
        # Every decode step brings one token and the accepted drafts, of which the last may be beyond the limit.
        assert 23 <= found.decode_steps + found.accepted_tokens <= 23 + 3
        assert (found.decode_steps == 23) == (found.accepted_tokens == 0)


def test_time_in_a_drafter_on_the_host_is_part_of_decoding_and_of_no_other_engine():
    events, timings = served("drafter=ngram", *FIXED)
    assert all(0.0 < found.draft_ms <= found.decode_ms for found in timings)
    assert sum(event.draft_ms for event in events) > 0.0
    events, timings = served("drafter=none")
    assert all(found.draft_ms == 0.0 for found in timings) and not any(event.draft_ms for event in events)
