"""The rule by which a server has more or fewer engines, on figures alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contracts.config import AutoscaleSettings, FleetSettings
from engine.service.autoscale import Decision, Figures, Memory, decide

ONE_TO_THREE = AutoscaleSettings(min=1, max=3, backlog_s=2.0, up_after_s=2.0, down_after_s=10.0)
FROM_ZERO = replace(ONE_TO_THREE, min=0)
QUIET = Figures(0.0, up=1, sequences=0, held=0, backlog_s=0.0, saturation=0.0)
BUSY = replace(QUIET, sequences=9, backlog_s=5.0, saturation=0.7)


def run(settings: AutoscaleSettings, seen: Iterable[Figures]) -> list[tuple[float, Decision]]:
    """The decisions, each with its time. The number of engines is as decided from then on."""
    memory, decided, up = Memory(), list[tuple[float, Decision]](), None
    for figures in seen:
        found = figures if up is None else replace(figures, up=up)
        decision, memory = decide(settings, found, memory)
        if decision is not None:
            decided.append((figures.at_s, decision))
            up = decision.engines
    return decided


def over(seconds: float, figures: Figures, begin_s: float = 0.0) -> list[Figures]:
    """Twice a second."""
    return [replace(figures, at_s=begin_s + each / 2) for each in range(int(seconds * 2) + 1)]


def test_a_backlog_that_lasts_starts_one_engine_after_the_other() -> None:
    decided = run(ONE_TO_THREE, over(20, BUSY))
    assert [(at_s, decision.engines) for at_s, decision in decided] == [(2.0, 2), (4.5, 3)]
    assert decided[0][1].reason == "a backlog of 5.0 s, over fleet.autoscale.backlog_s=2 for 2 s"


def test_full_rows_start_one_though_no_prompt_waits_or_nothing_was_measured() -> None:
    for backlog_s in (0.0, None):
        full = replace(BUSY, backlog_s=backlog_s, saturation=1.0)
        ((at_s, decision),) = run(replace(ONE_TO_THREE, max=2), over(5, full))
        assert (at_s, decision.reason) == (2.0, "no row or KV block left for 2 s")


def test_a_burst_that_ends_in_time_changes_nothing() -> None:
    seen = [*over(1.5, BUSY), *over(0, QUIET, 2.0), *over(1.5, BUSY, 2.5)]
    assert run(ONE_TO_THREE, seen) == []


def test_engines_that_have_been_idle_for_long_go_one_after_the_other_down_to_the_fewest() -> None:
    decided = run(ONE_TO_THREE, over(60, replace(QUIET, up=3)))
    assert [(at_s, decision.engines) for at_s, decision in decided] == [(10.0, 2), (20.5, 1)]
    assert decided[0][1].reason == "idle for 10 s"
    assert [decision.engines for _, decision in run(FROM_ZERO, over(60, replace(QUIET, up=3)))] == [2, 1, 0]


def test_an_engine_goes_only_where_the_others_would_be_half_full_at_most() -> None:
    two = replace(QUIET, up=2, sequences=5)
    for saturation, backlog_s, goes in ((0.25, 0.0, True), (0.26, 0.0, False), (0.1, 0.5, True), (0.1, 0.6, False)):
        decided = run(ONE_TO_THREE, over(11, replace(two, saturation=saturation, backlog_s=backlog_s)))
        assert [decision.engines for _, decision in decided] == [1] * goes, (saturation, backlog_s)


def test_the_last_engine_goes_only_where_nothing_is_left_to_do() -> None:
    assert run(FROM_ZERO, over(60, replace(QUIET, sequences=1))) == []
    assert run(FROM_ZERO, over(60, replace(QUIET, held=1))) == []
    assert [decision.engines for _, decision in run(FROM_ZERO, over(60, QUIET))] == [0]


def test_a_request_that_waits_starts_the_first_engine_at_once() -> None:
    asleep = replace(QUIET, up=0, backlog_s=None)
    assert run(FROM_ZERO, over(60, asleep)) == []
    ((at_s, decision),) = run(replace(FROM_ZERO, max=1), over(5, replace(asleep, held=3)))
    assert (at_s, decision) == (0.0, Decision(1, "3 requests wait for an engine"))


def test_who_stopped_too_many_by_hand_gets_them_back() -> None:
    ((at_s, decision),) = run(replace(ONE_TO_THREE, min=2), over(1, QUIET))
    assert (at_s, decision.engines) == (0.0, 2)


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 3), st.floats(0, 9) | st.none(), st.floats(0, 1)), max_size=80
    )
)
def test_the_number_stays_within_its_limits_and_never_changes_twice_within_the_delays(loads: list) -> None:
    seen = [Figures(float(at), 1, *load) for at, load in enumerate(loads)]
    decided = run(ONE_TO_THREE, seen)
    assert all(1 <= decision.engines <= 3 for _, decision in decided)
    times = [at_s for at_s, _ in decided]
    assert all(later - earlier > ONE_TO_THREE.up_after_s for earlier, later in pairwise(times))


def test_a_constant_load_does_not_swing() -> None:
    """What made one more engine start cannot let it go again: the share that each of the others would get is too
    much."""
    one = replace(BUSY, backlog_s=2.1, saturation=0.5)
    decided = run(ONE_TO_THREE, over(2, one))
    assert [decision.engines for _, decision in decided] == [2]
    two = replace(one, up=2, backlog_s=one.backlog_s / 2 if one.backlog_s else None, saturation=0.25)
    assert run(ONE_TO_THREE, over(60, two)) == []


def test_settings_that_make_no_sense_are_refused() -> None:
    for words, made in (
        ("fleet.autoscale.min=0 needs fleet.autoscale.max", lambda: AutoscaleSettings(min=0)),
        ("fleet.autoscale.max=1", lambda: AutoscaleSettings(min=2, max=1)),
        ("leave fleet.replicas out", lambda: FleetSettings(3, AutoscaleSettings(max=2))),
    ):
        with pytest.raises(ValueError, match=words):
            made()


def test_memory_and_devices_are_for_the_most_engines_and_the_fewest_are_started() -> None:
    fleet = FleetSettings(autoscale=AutoscaleSettings(min=0, max=3))
    assert (fleet.replicas, fleet.at_start) == (3, 1), "one shows whether the plan can run"
    assert FleetSettings(2).at_start is None
