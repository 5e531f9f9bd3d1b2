"""Where the time of a request went, from events alone."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from engine.contracts.events import AdmittedEvent, Chunk, PreemptedEvent, RequestEvent, StepEvent
from engine.contracts.request import StagedTokens
from engine.service.chrome_trace import PID, STEPS_TRACK, chrome_trace
from engine.service.trace_context import valid_traceparent
from engine.service.waterfall import Waterfall, Waterfalls
from engine.testing.exporter import request_event, step_event

from .strict_chrome_trace import read

TIMES = {
    "receive_ms": 1.0, "tokenize_ms": 2.0, "route_ms": 0.5, "dispatch_ms": 0.5, "queue_ms": 6.0, "prefill_ms": 20.0,
    "decode_ms": 40.0, "deliver_ms": 1.0, "unattributed_ms": 0.0, "e2e_ms": 71.0,
}  # fmt: skip
"""One second after the clock began the request came in; it was queued at 4 ms, and prefilled from 10 to 30 ms."""


def request(name: str = "mine-0", began_s: float = 1.0, **changes: Any) -> RequestEvent:
    times = TIMES | changes
    return msgspec.structs.replace(
        request_event(began_s + times["e2e_ms"] / 1e3, **times),
        request_id=name,  # type: ignore[arg-type]
    )


def step(number: int, ended_ms: float, *chunks: Chunk, **changes: Any) -> StepEvent:
    """Ten milliseconds long."""
    event = step_event(1.0 + ended_ms / 1e3, step=number, duration_ms=10.0, **changes)
    return msgspec.structs.replace(event, chunks=chunks)


STEPS = (
    step(1, 10, Chunk("other-0", 900, 0), running=3),
    step(2, 20, Chunk("mine-0", 64, 0), Chunk("other-0", 300, 900)),
    step(3, 30, Chunk("mine-0", 32, 64)),
    step(4, 40, captured=True),
    step(5, 50, Chunk("late-0", 500, 0), gap_ms=0.25),
    step(6, 70, captured=True, gap_ms=0.5),
    step(7, 900, Chunk("never-0", 5000, 0)),
)


def one(*events: Any, name: str = "mine-0") -> Waterfall:
    waterfalls = Waterfalls()
    waterfalls.add([*STEPS, *events])
    (found,) = waterfalls.find(name)
    return found


@pytest.mark.parametrize(
    ("staged", "said"),
    [
        (StagedTokens("disk", 3072, 41.2, 1690.0), "staged 3,072 tokens from disk in 41 ms, recompute 1,690"),
        (StagedTokens("disk", 3072, 41.2, 0.0), "staged 3,072 tokens from disk in 41 ms"),
        (StagedTokens("peer", 0, 845.0, 1690.0), "waited 845 ms for peer in vain"),
    ],
)
def test_a_queue_says_what_waiting_for_records_came_to(staged: StagedTokens, said: str) -> None:
    queued = msgspec.structs.replace(request(queue_ms=60.0, e2e_ms=125.0), staged=staged, loaded={"disk": 3072})
    shown = one(queued).plain()
    (queue,) = [span for span in shown["spans"] if span["name"] == "queue"]
    assert queue["staged"]["said"] == said and said in shown["cause"] and shown["loaded"] == {"disk": 3072}


def test_spans_follow_each_other_and_add_up_to_the_whole() -> None:
    shown = one(request(last_write_ms=3.0)).plain()
    at = 0.0
    for span in shown["spans"]:
        assert span["start_ms"] == pytest.approx(at)
        at += span["ms"]
    assert at + shown["unattributed_ms"] == pytest.approx(shown["total_ms"]) and shown["total_ms"] == 74.0
    assert [span["name"] for span in shown["spans"]][-2:] == ["deliver", "write"]


def test_chunks_lie_in_the_span_of_prefill_and_do_not_overlap() -> None:
    (prefill,) = (span for span in one(request()).spans if span.name == "prefill")
    assert [(chunk.detail["num_tokens"], chunk.detail["context"]) for chunk in prefill.inside] == [(64, 0), (32, 64)]
    assert [(chunk.start_ms, chunk.ms) for chunk in prefill.inside] == [
        (pytest.approx(10), pytest.approx(10)),
        (pytest.approx(20), pytest.approx(10)),
    ]


@pytest.mark.parametrize(
    ("span", "who", "tokens", "steps"),
    [("queue", "other-0", 900, 1), ("prefill", "other-0", 300, 1), ("decode", "late-0", 500, 1)],
)
def test_each_span_says_whose_prompt_was_computed_meanwhile(span: str, who: str, tokens: int, steps: int) -> None:
    (found,) = (each for each in one(request()).spans if each.name == span)
    assert found.detail["blocked_by"] == {"request_id": who, "num_tokens": tokens, "steps": steps, "of": 1}


def test_who_runs_alone_is_blocked_by_nobody() -> None:
    waterfalls = Waterfalls()
    waterfalls.add([step(1, 30, Chunk("mine-0", 64, 0)), step(2, 60), request()])
    (alone,) = waterfalls.find("mine-0")
    assert all("blocked_by" not in span.detail for span in alone.spans)


def test_decode_says_how_many_steps_were_captured_and_how_long_the_device_waited() -> None:
    (decode,) = (span for span in one(request()).spans if span.name == "decode")
    assert (decode.detail["steps"], decode.detail["captured_steps"], decode.detail["gap_ms"]) == (3, 2, 0.75)


def test_a_preemption_is_shown_where_it_fell_with_who_took_the_blocks() -> None:
    lost, again = PreemptedEvent(1.045, "mine-0", 97, by="late-0"), AdmittedEvent(1.055, "mine-0", 10.0, 64, 1)
    found = one(AdmittedEvent(1.01, "mine-0", 6.0, 0), lost, again, request(preemptions=1))
    (decode,) = (span for span in found.spans if span.name == "decode")
    (shown,) = decode.detail["preempted"]
    assert shown == {"at_ms": pytest.approx(45), "lost_tokens": 97, "by": "late-0", "waited_ms": 10.0}
    assert found.cause == "decode 56 %, beside 500 prompt tokens of late-0, preempted once"


def test_a_slow_reader_is_told_from_a_slow_engine() -> None:
    assert one(request(write_ms=30.0)).cause.endswith("the client reads slowly")
    assert "reads slowly" not in one(request(write_ms=1.0)).cause


def test_all_sequences_of_an_api_request_are_found_by_its_id() -> None:
    waterfalls = Waterfalls()
    waterfalls.add([*STEPS, request("cmpl-a-0"), request("cmpl-a-1"), request("cmpl-b-0")])
    assert [found.request.request_id for found in waterfalls.find("cmpl-a")] == ["cmpl-a-0", "cmpl-a-1"]
    assert waterfalls.find("cmpl-c") == [] and len(waterfalls.find("cmpl-b-0")) == 1
    assert [found.request.request_id for found in waterfalls.recent(2)] == ["cmpl-b-0", "cmpl-a-1"]


def test_steps_of_another_engine_are_no_part_of_a_request() -> None:
    elsewhere = [msgspec.structs.replace(each, engine="other") for each in STEPS]
    waterfalls = Waterfalls()
    waterfalls.add([*elsewhere, request(), request("theirs-0", engine="other")])
    (mine,), (theirs,) = waterfalls.find("mine-0"), waterfalls.find("theirs-0")
    assert (mine.plain()["engine"], theirs.plain()["engine"]) == ("default", "other")
    steps = [[span.detail["steps"] for span in each.spans if "steps" in span.detail] for each in (mine, theirs)]
    assert steps[0] == [0, 0, 0] and all(steps[1])


def test_a_request_that_moved_on_has_the_time_before_in_route_and_steps_of_the_engine_that_served_it() -> None:
    """The first engine admitted and preempted it, computed a part of its prompt, and died."""
    at_first = [
        AdmittedEvent(1.002, "mine-0", 1.0, 0, 1, engine="first"),
        *(msgspec.structs.replace(each, engine="first") for each in STEPS),
        PreemptedEvent(1.045, "mine-0", 64, by="other-0", engine="first"),
    ]
    served = [
        msgspec.structs.replace(step(1, 90, Chunk("mine-0", 96, 0)), engine="second"),
        msgspec.structs.replace(step(2, 130), engine="second"),
    ]
    moved = request(route_ms=60.5, e2e_ms=131.0, engine="second", attempts=2)
    found = one(*at_first, *served, moved)
    spans = {span.name: span for span in found.spans}
    assert spans["route"].detail == {"attempts": 2} and found.plain()["attempts"] == 2
    assert found.cause == "route 46 %, 1 engine had it before second"
    assert [chunk.detail["num_tokens"] for chunk in spans["prefill"].inside] == [96]
    assert not any("blocked_by" in span.detail or "preempted" in span.detail for span in found.spans)


def test_the_requests_of_one_engine_can_be_asked_for() -> None:
    waterfalls = Waterfalls()
    waterfalls.add([request(f"{engine}-{at}", engine=engine) for at in range(3) for engine in ("a", "b")])
    assert [found.request.request_id for found in waterfalls.recent(2, "a")] == ["a-2", "a-1"]
    assert len(waterfalls.recent(9)) == 6 and waterfalls.recent(9, "c") == []


def test_the_requests_that_took_longest_can_be_asked_for() -> None:
    waterfalls = Waterfalls()
    took = [(30.0, "chat"), (900.0, "chat"), (50.0, "code"), (400.0, "chat")]
    waterfalls.add([request(f"r{at}", at, e2e_ms=ms, slo_class=name) for at, (ms, name) in enumerate(took)])

    def asked(**by: Any) -> list[str]:
        return [found.request.request_id for found in waterfalls.recent(2, **by)]

    assert asked(order="total") == ["r1", "r3"] and asked() == ["r3", "r2"]
    assert asked(order="total", since_s=2.0) == ["r3", "r2"] and asked(slo_class="code") == ["r2"]


def test_a_chrome_trace_has_a_track_for_the_steps_of_each_engine() -> None:
    elsewhere = [msgspec.structs.replace(each, engine="other") for each in STEPS[:2]]
    tracks = chrome(*STEPS, *elsewhere, request("cmpl-a-0"), request("cmpl-a-1", engine="other"))
    assert [(tid, len(found)) for (_, tid), found in sorted(tracks.items())] == [(0, 6), (1, 2), (2, 8), (3, 8)]
    assert all(name.startswith("step") for tid in (0, 1) for _, _, name in tracks[PID, tid])


def test_what_is_kept_is_bounded_however_many_requests_come() -> None:
    waterfalls = Waterfalls(max_requests=4, max_steps=8)
    for number in range(100):
        name = f"r{number}-0"
        marks = [PreemptedEvent(1.0, name, 1)] * 100
        waterfalls.add([AdmittedEvent(1.0, name, 0.0, 0, 1), *marks, step(number, 10), request(name)])
    assert len(waterfalls.recent(1000)) == 4 and len(waterfalls.steps("default", 0.0, 10.0)) == 8
    assert len(waterfalls._marks) <= 8 and all(len(m.preempted) <= 64 for m in waterfalls._marks.values())


def test_spans_whose_steps_are_forgotten_are_shown_without() -> None:
    waterfalls = Waterfalls()
    waterfalls.add([request()])
    (found,) = waterfalls.find("mine-0")
    assert sum(span.ms for span in found.spans) == pytest.approx(71.0)
    assert all(span.detail.get("steps", 0) == 0 for span in found.spans)


def chrome(*events: Any) -> dict[tuple[int, int], list[tuple[int, int, str]]]:
    """Slices by track, read strictly."""
    waterfalls = Waterfalls()
    waterfalls.add(events)
    trace = chrome_trace(waterfalls.find("cmpl-a"), waterfalls.steps)
    return read(json.dumps(trace).encode())


def test_a_chrome_trace_has_a_track_for_the_steps_and_one_for_each_sequence() -> None:
    tracks = chrome(*STEPS, request("cmpl-a-0"), request("cmpl-a-1", began_s=1.004))
    assert [(tid, len(found)) for (_, tid), found in sorted(tracks.items())] == [(STEPS_TRACK, 6), (1, 8), (2, 8)]
    assert tracks[PID, 1][4] == (4_000_000, 10_000_000, "queue") and tracks[PID, 2][0][0] == 4_000_000


def test_a_chrome_trace_nests_although_times_are_rounded_and_steps_end_after_their_tokens() -> None:
    late = [step(2, 20.0004, Chunk("cmpl-a-0", 64, 0)), step(3, 30.0031, Chunk("cmpl-a-0", 32, 64))]
    rounded = {"receive_ms": 1.0004, "deliver_ms": 1.0003, "unattributed_ms": -0.0007, "last_write_ms": 2.0001}
    names = [name for _, _, name in chrome(*late, request("cmpl-a-0", **rounded))[PID, 1]]
    assert names[5:8] == ["prefill", "chunk", "chunk"] and names[-2:] == ["deliver", "write"]


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        ([PARENT], PARENT),
        ([PARENT[:-1] + "f"], PARENT),
        (["cc" + PARENT[2:] + "-more"], PARENT),
        ([], ""),
        ([PARENT, PARENT], ""),
        ([PARENT.upper()], ""),
        (["ff" + PARENT[2:]], ""),
        ([PARENT + "-more"], ""),
        (["00-" + "0" * 32 + PARENT[35:]], ""),
        ([PARENT[:36] + "0" * 16 + "-01"], ""),
        (["00-0af7"], ""),
    ],
)
def test_a_trace_context_is_taken_over_if_it_is_valid(sent: list[str], taken: str) -> None:
    assert valid_traceparent(sent) == taken
