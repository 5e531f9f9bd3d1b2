from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.lab.bench.test_load import Server, VirtualTime

from engine_lab.bench.distribution import parse_distribution
from engine_lab.bench.load import Limit
from engine_lab.bench.record import RequestRecord
from engine_lab.bench.replay import play, schedule_of
from engine_lab.bench.workload import Workload, random_text
from engine_lab.shared.simulation.trace import TraceRequest
from engine_lab.shared.simulation.traces.reading import read_trace, with_rate

WORKLOAD = Workload(parse_distribution("1"), parse_distribution("1"), 0.0, 4.0, "n1", 0, random_text(0, 20_000))
UNLIMITED = Limit(None, None)


def common(a, b) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("vocab_size", [None, 1000])
def test_prompts_of_a_trace_share_as_many_tokens_as_its_hashes_say(tmp_path, vocab_size):
    lines = [
        {"format": "engine.trace.v1", "started": 5.0, "block_tokens": 16},
        {"arrival_s": 1.0, "prompt_tokens": 100, "output_tokens": 7, "block_hashes": [11, 12, 13, 14, 15, 16]},
        {"arrival_s": 1.5, "prompt_tokens": 70, "output_tokens": 9, "block_hashes": [11, 12, 13, 24]},
        {"arrival_s": 2.0, "prompt_tokens": 200, "output_tokens": 3, "block_hashes": []},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    workload = replace(WORKLOAD, vocab_size=vocab_size)
    schedule = schedule_of(read_trace(path), workload, speed=2.0)
    per_token = 1 if vocab_size else 4
    first, second, third = (due.request.prompt for due in schedule)
    assert [len(due.request.prompt) for due in schedule] == [100 * per_token, 70 * per_token, 200 * per_token]
    assert [due.request.max_tokens for due in schedule] == [7, 9, 3]
    assert [due.at_s for due in schedule] == [0.0, 0.25, 0.5]
    assert common(first, second) == pytest.approx(48 * per_token, abs=3 if vocab_size is None else 0.5)
    assert common(first, third) <= 2 * per_token
    other_run = schedule_of(read_trace(path), replace(workload, nonce="n2"))[0].request.prompt
    assert common(first, other_run) <= 2 * per_token


def played(schedule, seconds=10.0, limit=UNLIMITED) -> list[RequestRecord]:
    time, records = VirtualTime(), []
    time.run(play(Server(time, seconds), schedule, limit, time.clock, records.append, time.sleep))
    return sorted(records, key=lambda record: record.index)


def test_requests_are_sent_at_their_moments_and_turns_after_the_answers_they_wait_for():
    trace = [
        TraceRequest(0.0, 4, 1, request_id="a"),
        TraceRequest(3.0, 4, 1, request_id="b", after=("a",)),
        TraceRequest(1.0, 4, 1, request_id="c"),
        TraceRequest(2.0, 4, 1, after=("b", "c")),
    ]
    assert [record.scheduled_s for record in played(schedule_of(trace, WORKLOAD))] == [0, 13, 1, 25]
    twice = schedule_of(trace, WORKLOAD, speed=2.0)
    assert [record.scheduled_s for record in played(twice)] == [0, 11.5, 0.5, 22.5]
    assert [record.index for record in played(twice, limit=Limit(3, None))] == [0, 1, 2]
    assert [record.index for record in played(twice, limit=Limit(None, 11.0))] == [0, 2]
    with pytest.raises(ValueError, match="waits for 'b', which is not in the trace"):
        schedule_of(trace[2:], WORKLOAD)


def test_a_trace_without_times_gets_arrivals_for_the_first_request_of_each_session():
    trace = [TraceRequest(0.0, 4, 1, request_id="a"), TraceRequest(0.0, 4, 1, after=("a",)), TraceRequest(0.0, 4, 1)]
    timed = with_rate(trace, 2.0, seed=1)
    assert timed[0].arrival_s == timed[1].arrival_s == 0.0 < timed[2].arrival_s
