"""Traces of all formats: small files as their publishers write them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from engine_lab.shared.simulation.trace import TraceRequest
from engine_lab.shared.simulation.traces.lines import TraceError
from engine_lab.shared.simulation.traces.reading import format_of, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,API log
118,GPT-4,417,276,693,Conversation log
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 2353]}
"""
SESSIONS = """{"session_id": "a", "timestamp": 1000, "input_length": 20, "output_length": 2, "hash_ids": [1]}
{"session_id": "a", "timestamp": 3500, "input_length": 30, "output_length": 2, "hash_ids": [1]}
{"session_id": "a", "delay_ms": 50, "input_length": 40, "output_length": 2, "hash_ids": [1]}
{"request_id": "z", "timestamp": 9, "input_length": 9, "output_length": 1, "wait_for": ["line 1", "line 2"], "delay": 7}
"""
SHAREGPT = [
    {
        "id": "x",
        "conversations": [
            {"from": "human", "value": "a" * 40},
            {"from": "gpt", "value": "b" * 80},
            {"from": "human", "value": "c" * 8},
            {"from": "gpt", "value": "d" * 4},
        ],
    }
]


def dynamo(request_id: str, received_ms: int, ended_ms: int, session: str = "") -> dict[str, object]:
    replay = {"trace_block_size": 64, "input_length": 100, "input_sequence_hashes": [101, 2**64 - 1]}
    request = {"request_id": request_id, "request_received_ms": received_ms, "output_tokens": 4, "replay": replay}
    return {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": ended_ms,
        **({"agent_context": {"session_id": session}} if session else {}),
        "request": request,
    }


def written(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_azure(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, AZURE))
    assert first == TraceRequest(0.0, 374, 44)
    assert (second.arrival_s, second.prompt_tokens) == (pytest.approx(4.314579, abs=1e-6), 396)


def test_burstgpt_leaves_out_failed_requests(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, BURSTGPT)) == [TraceRequest(0.0, 472, 18), TraceRequest(113.0, 417, 276)]


def test_mooncake(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, MOONCAKE))
    assert (first.arrival_s, first.prompt_tokens, first.output_tokens) == (0.0, 6955, 52)
    assert (first.block_hashes, first.block_tokens) == ((46, 47), 512)
    assert second.arrival_s == pytest.approx(3.053)


def test_turns_of_a_session_wait_for_each_other(tmp_path: Path) -> None:
    _, second, third, fourth = read_trace(written(tmp_path, SESSIONS))
    assert (second.after, second.arrival_s) == (("line 1",), pytest.approx(2.5))
    assert (third.after, third.arrival_s) == (("line 2",), pytest.approx(0.05))
    assert (fourth.after, fourth.arrival_s) == (("line 1", "line 2"), pytest.approx(0.007))


def test_ids_may_be_the_number_0(tmp_path: Path) -> None:
    _, second, *_ = read_trace(written(tmp_path, SESSIONS.replace('"session_id": "a"', '"session_id": 0')))
    assert (second.session, second.after) == ("0", ("line 1",))


def test_dynamo_orders_requests_by_arrival_and_rebuilds_sessions(tmp_path: Path) -> None:
    events = [dynamo("b", 2000, 2500, "s"), {"event_type": "tool_end"}, {"event": dynamo("a", 1000, 1200, "s")}]
    first, second = read_trace(written(tmp_path, "\n".join(map(json.dumps, events))))
    assert first == TraceRequest(0.0, 100, 4, (101, 2**64 - 1), 64, "s", "a")
    assert (second.after, second.arrival_s) == (("a",), pytest.approx(0.8))


def test_sharegpt_prompts_are_all_that_was_said_before(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, json.dumps(SHAREGPT)))
    assert [(r.prompt_tokens, r.output_tokens) for r in (first, second)] == [(10, 20), (32, 1)]
    assert second.after == (first.request_id,)
    assert second.block_hashes[: len(first.block_hashes)] == first.block_hashes


def test_own_traces_of_several_runs(tmp_path: Path) -> None:
    lines = [
        {"format": "engine.trace.v1", "started": 1000.0, "block_tokens": 16},
        {"arrival_s": 2.0, "prompt_tokens": 40, "output_tokens": 3, "block_hashes": [1, 2]},
        {"format": "engine.trace.v1", "started": 1010.0, "block_tokens": 16},
        {"arrival_s": 1.0, "prompt_tokens": 40, "output_tokens": 3, "block_hashes": [9]},
    ]
    first, second = read_trace(written(tmp_path, "\n".join(map(json.dumps, lines))))
    assert (first.arrival_s, second.arrival_s) == (0.0, 9.0) and first.block_hashes == (1, 2)


def test_files_packed_by_gzip_and_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(MOONCAKE.encode()))
    assert len(read_trace(path)) == 2 and len(read_trace(path, limit=1)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AZURE + "yesterday,1,2\n", "line 4: TIMESTAMP is 'yesterday', expected a date and time"),
        (AZURE + "2023-11-16 18:15:46+00:00,1,2\n", "line 4: TIMESTAMP .* a time zone in both or in neither"),
        (AZURE + "2023-11-16 18:15:46,1\n", "line 4: it has 2 values, expected 3"),
        (BURSTGPT + "5,ChatGPT,x,18,490,API log\n", "line 5: Request tokens is 'x', expected a whole number from 1 on"),
        (MOONCAKE + "{\n", "line 3: expected a JSON object"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 2}', "line 3: output_length is missing"),
        (MOONCAKE + '{"timestamp": -1, "input_length": 2, "output_length": 2}', "timestamp is -1, expected a number"),
        ('{"hash_ids": "x", "timestamp": 1, "input_length": 2, "output_length": 2}', "hash_ids is x, expected a list"),
        ("[1]", "expected a list of conversations"),
        ("", "the file is empty"),
        ("a,b\n", "of no known format; expected one of engine, azure"),
        ('{"type": "step", "at_s": 1.0}\n', "events of exporter jsonl; exporter=\\[trace\\]"),
    ],
)  # fmt: skip
def test_bad_lines_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(written(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"gone\.jsonl: no such file"):
        read_trace(tmp_path / "gone.jsonl")


def test_a_format_that_is_named_is_not_looked_for(tmp_path: Path) -> None:
    path = written(tmp_path, MOONCAKE)
    assert format_of(path) == "mooncake"
    with pytest.raises(TraceError):
        read_trace(path, "azure")
