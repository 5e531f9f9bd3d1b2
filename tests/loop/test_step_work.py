"""What the loop says of its steps: whose prompts they computed, what they read, who lost its blocks to whom."""

from __future__ import annotations

from typing import Any

import pytest

from engine.contracts.events import MAX_CHUNKS, AdmittedEvent, Chunk, Event, PreemptedEvent, StepEvent
from engine.contracts.request import EngineRequest, SamplingParams
from engine.loop.step_work import contents_of
from engine.step.plan import StepRow

from .simulated import simulate


def request(name: str, prompt_len: int, max_tokens: int) -> EngineRequest:
    return EngineRequest(name, tuple(range(1, prompt_len + 1)), SamplingParams(max_tokens=max_tokens, temperature=0.0))


def events_of(*requests: EngineRequest, overrides: tuple[str, ...] = (), **options: Any) -> list[Event]:
    simulation = simulate("drafter=none", *overrides, **options)
    for each in requests:
        simulation.core.submit(each)
    events: list[Event] = []
    while simulation.core.has_work:
        events += simulation.core.step().events
    return events


def test_every_prompt_token_is_in_a_chunk_and_every_decode_reads_what_is_there() -> None:
    events = events_of(request("long", 100, 4), in_flight=1)
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert [step.chunks for step in steps] == [(Chunk("long", 64, 0),), (Chunk("long", 36, 64),), (), (), ()]
    assert [step.prefill_context for step in steps] == [64 * 65 // 2, 36 * 64 + 36 * 37 // 2, 0, 0, 0]
    assert [step.decode_context for step in steps] == [0, 0, 101, 102, 103]
    assert not any(step.captured for step in steps)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_chunks_of_all_steps_are_the_prompts(in_flight: int) -> None:
    requests = [request(f"r{i}", 10 + 37 * i, 6) for i in range(5)]
    found = dict.fromkeys((each.request_id for each in requests), 0)
    for event in events_of(*requests, overrides=("kv_allocator=paged",), in_flight=in_flight):
        for chunk in event.chunks if isinstance(event, StepEvent) else ():
            assert chunk.context == found[chunk.request_id]
            found[chunk.request_id] += chunk.num_tokens
    assert found == {each.request_id: len(each.prompt) for each in requests}


def test_the_largest_chunks_are_named_where_there_are_many() -> None:
    class Prompt:
        prompt_len = 1000

        def __init__(self, name: str) -> None:
            self.request_id = name

    rows = [(StepRow(i, 0, i + 1, samples=False, num_drafts=0), Prompt(f"r{i}")) for i in range(2 * MAX_CHUNKS)]
    contents = contents_of(rows)  # type: ignore[arg-type]
    assert [chunk.num_tokens for chunk in contents.chunks] == list(range(2 * MAX_CHUNKS, MAX_CHUNKS, -1))


def test_a_preemption_says_who_took_the_blocks_and_how_long_its_victim_waited() -> None:
    events = events_of(*(request(f"r{i}", 40, 60) for i in range(4)), in_flight=1, kv_tokens=256)
    lost = [event for event in events if isinstance(event, PreemptedEvent)]
    again = [event for event in events if isinstance(event, AdmittedEvent) and event.preemptions]
    assert lost and len(again) == len(lost)
    assert all(event.lost_tokens >= 40 and event.by != event.request_id for event in lost)
    for event in lost:
        back = next(one for one in again if one.request_id == event.request_id and one.at_s > event.at_s)
        assert back.waited_ms == pytest.approx((back.at_s - event.at_s) * 1e3)
    first = [event for event in events if isinstance(event, AdmittedEvent) and not event.preemptions]
    assert sorted(event.request_id for event in first) == ["r0", "r1", "r2", "r3"]
