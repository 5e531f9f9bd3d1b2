"""``tools/attack`` finds what it looks for, and the server holds against a little of each attack."""

import asyncio
import json
import random
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.attack import aborts, bodies, burst, connections, determinism, fairness, fleet, fuzz, grammars, soak, stop  # noqa: E402
from tools.attack.client import CHAT, Answer, Reply, ask  # noqa: E402
from tools.attack.harness import Target, serve  # noqa: E402

OVERRIDES = (
    *("server.stall_s=5", "server.max_queue=64", "server.max_n=16"),
    *("model.max_len=1024", "scheduler.max_requests=16", "threads=1", "device=cpu"),
)
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def target():
    """One server for all: the attack that kills its engine comes last."""
    server = serve(*OVERRIDES)
    with asyncio.Runner() as runner:
        yield runner.run(server.__aenter__())
        runner.run(server.__aexit__(None, None, None))


def held(attack):
    """Run it; the rows whose bar was missed, but for times and amounts that depend on the machine."""
    rows = asyncio.run(attack)
    assert rows
    return [row for row in rows if row.held is False and not row.measured]


def answered(*parts, end=b"0\r\n\r\n", choices=1):
    """What the client makes of a stream of these parts."""

    async def run():
        async def serve_once(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + end)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve_once, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await ask(Target("127.0.0.1", port), CHAT, {"stream": True, "n": choices})

    return asyncio.run(run()).ending


def test_the_client_tells_a_whole_stream_from_one_that_was_cut():
    text = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n'
    last = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
    done, error = b"data: [DONE]\n\n", b'data: {"error":{"message":"a","code":"b"}}\n\n'
    assert answered(text, last, done) == "whole"
    assert answered(text + last[:20], last[20:] + done) == "whole"
    assert answered(text, error, done) == "error"
    assert answered(text, last, done, choices=2) == "truncated"
    assert answered(text, done) == answered(text, last) == answered() == "truncated"
    assert answered(text, end=b"") == answered(text, end=b"5\r\nab") == "broken"


def test_the_fuzzer_sees_leaks_failures_and_odd_refusals():
    def found(status, body, sent=b"POST / HTTP/1.1"):
        findings = fuzz.Findings()
        findings.look(sent, Reply(status, {}, body))
        return set(findings.counts)

    refusal = '{"error":{"message":"%s","type":"a","param":null,"code":null}}'
    assert found(200, b"") == found(400, (refusal % "Unknown field 'a/b'.").encode()) == set()
    assert found(500, refusal.encode()) == found(200, b'data: {"error":{}}\n\n') == {"5xx"}
    assert found(400, b"400: Bad Request") == found(404, b'{"error":{"message":"a"}}') == {"not the error object"}
    for leak in ("at 0x7f12ab34cd56", "/usr/lib/engine", "x" * 601):
        body = (refusal % leak).encode()
        assert found(400, body) == {"message too long or leaking"}
    assert found(400, (refusal % "/usr/lib/engine").encode(), b"POST /usr/lib/engine HTTP/1.1") == set()


def test_the_slope_of_memory_is_per_minute():
    assert soak.slope([(float(s), 100 + s / 30) for s in range(100)]) == pytest.approx(2)


def test_the_attack_on_two_engines_sees_what_is_lost_cut_repeated_and_changed():
    asked = fleet.Question(CHAT, {}, {0: "ab", 1: "cd"})

    def found(**answer):
        seen = fleet.Seen()
        fleet.note(asked, Answer(**answer), "a", seen)
        return {kind for kind in ("wrong", "truncated", "twice", "lost") if getattr(seen, kind)}

    both = {0: "ab", 1: "cd"}
    assert found(ending="whole", outputs=both, finishes=[0, 1]) == set()
    assert found(ending="error", outputs={0: "a"}, code="engine_dead") == set()
    assert found(ending="whole", outputs={0: "ab"}, finishes=[0, 1]) == {"wrong"}
    assert found(ending="error", outputs={0: "aab"}, code="engine_dead") == {"wrong"}
    assert found(ending="whole", outputs=both, finishes=[0, 1, 1]) == {"twice"}
    assert found(ending="truncated", outputs={0: "a"}) == found(ending="broken") == {"truncated"}
    assert found(ending="refused", code="engine_dead") == found(ending="error", code="engine_dead") == set()
    assert found(ending="refused", code="not_ready") == {"lost"}


def test_a_sequence_is_lost_that_fails_before_two_engines_died(tmp_path):
    def lost(hits_s, **event):
        shown = {"type": "request", "finish_reason": "error", "ttft_ms": 0.0, "e2e_ms": 5000.0, "at_s": 100.0}
        (events := tmp_path / "events").write_text(
            json.dumps(shown | {"request_id": "a", "engine": "b"} | event) + "\n"
        )
        return len(fleet.lost(events, hits_s))

    assert lost([]) == lost([94.0, 99.0]) == lost([], ttft_ms=1.0) == 1 and lost([96.0, 99.0]) == 0
    assert lost([], finish_reason="stop") == lost([], type="tokens") == 0


def test_two_engines_are_killed_and_restarted_and_nothing_is_lost():
    async def attacked():
        async with fleet.served(*OVERRIDES) as (target, events):
            return await fleet.attack(target, events, 250, seed=1, clients=6)

    rows = asyncio.run(attacked())
    assert [row for row in rows if row.held is False] == []


def test_mutated_requests_and_raw_bytes_are_refused_properly(target):
    assert held(fuzz.attack(target, 300, seed=1)) == []


def test_clients_that_go_away_leave_nothing_after(target):
    assert held(aborts.attack(target, 40, seed=1)) == []


def test_clients_that_pipeline_and_hang_up_do_not_keep_others_out(target):
    assert held(connections.pipelined(target, 8, 20)) == []


def test_one_client_does_not_keep_another_out(target):
    assert held(fairness.attack(target, 3, sequences=16, tokens=40)) == []


def test_outputs_are_the_same_in_quiet_and_beside_others(target):
    assert determinism.differences([("ab", [-1.0]), ("c", [-2.0])], [("ab", [-1.5]), ("d", [-9.0])]) == (1, 0.5)
    assert held(determinism.attack(target, 10, seed=1)) == []


def test_more_requests_than_the_queue_takes_are_refused_with_retry_after(target):
    assert held(burst.attack(target, 200, seconds=0)) == []


def test_grammars_that_are_made_to_be_slow_are_followed_or_refused(target):
    assert held(grammars.attack(target, 40, rounds=1)) == []


def test_large_bodies_are_refused_without_a_5xx(target):
    assert held(bodies.attack(target, ["ids", "nested fields"], 2, quiet_s=0.1)) == []


def test_an_engine_that_is_stopped_is_replaced_and_its_streams_end_in_errors(target):
    async def stopped():
        seen = stop.Seen()
        await stop.attack(target, random.Random(1), seen, 4, tokens=400)
        return stop.rows(seen)

    assert held(stopped()) == []
