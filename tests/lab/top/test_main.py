"""``engine top`` against a server, and without one."""

import asyncio
import json
import pty
import termios

import aiohttp
import msgspec
import pytest
from tests.http.fakes import chat, running
from tests.service.fakes import in_loop

from engine.cli.main import main
from engine.counters.engine import EngineCounters
from engine_lab.alerts.history import scrape_of
from engine_lab.shared.live import LiveEngine, LiveError, Sample, samples_of
from engine_lab.top.main import Watch, keys
from engine_lab.top.poll import COUNTERS, counters_of


def test_every_series_that_is_read_is_one_that_is_kept():
    kept = scrape_of(page := list(samples_of(EngineCounters(4).readings())), {sample.name for sample in page})
    whole = {sample.name for sample in page}
    assert {name for names in COUNTERS.values() for name in names} <= whole | kept.keys()


def test_counters_add_up_labels():
    counted = counters_of([
        Sample("engine_requests_total", {"finish_reason": "stop"}, 3),
        Sample("engine_requests_total", {"finish_reason": "abort"}, 1),
        *(Sample("engine_step_tokens_total", {"kind": kind}, count) for kind, count in (("prefill", 7), ("decode", 5))),
        Sample("engine_ttft_seconds_count", {}, 2), Sample("engine_itl_seconds_count", {}, 40),
    ])  # fmt: skip
    assert (counted["requests"], counted["prefill_tokens"], counted["output_tokens"]) == (4, 7, 42)


def test_one_look_at_a_server(served, capsys):
    served.do(served.running.post("/v1/chat/completions", chat()))
    assert main(["top", "--url", f"{served.url}/v1", "--once", "--json", "--interval", "0.1"]) == 0
    frame = json.loads(capsys.readouterr().out)
    assert (frame["latency"]["ttft_ms"]["n"], frame["latency"]["ttft_ms"]["p99"]) == (1, None)
    assert frame["slowest"][0]["request_id"].startswith("chatcmpl-") and "%" in frame["slowest"][0]["cause"]
    assert main(["top", "--url", served.url, "--once", "--interval", "0.1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("engine top  tiny  ") and "TTFT" in shown and "slowest" in shown


def test_of_several_engines_each_has_a_row_and_sums_are_of_all(served_by_two, capsys):
    served_by_two.do(served_by_two.running.post("/v1/chat/completions", chat()))
    for count, client in enumerate(served_by_two.clients.values(), 3):
        client.stats = msgspec.structs.replace(client.stats, running=count)
    look = ["top", "--url", served_by_two.url, "--once", "--interval", "0.1"]
    assert main([*look, "--json"]) == 0
    frame = json.loads(capsys.readouterr().out)
    assert [frame["engines"][name]["running"] for name in "ab"] == [3, 4] and frame["running"] == 7
    assert [frame["engines"][name]["latency"]["ttft_ms"]["n"] for name in "ab"] == [1, 0] and frame["latency"] == {}
    assert len(frame["slowest"]) == 1 and frame["states"] == {"a": "ready", "b": "ready"}
    assert main(look) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "2 engines" in shown[0]
    assert [line.split()[:2] for line in shown if line.split()[:1] in (["a"], ["b"], ["all"])] == [
        ["a", "3"], ["b", "4"], ["all", "7"]
    ]  # fmt: skip
    assert main([*look, "--engine", "b"]) == 0
    alone = capsys.readouterr().out
    assert "TPOT" in alone and alone.splitlines()[0].endswith(" b") and "2 engines" not in alone
    assert main([*look, "--engine", "c"]) == 1
    assert "has no engine 'c'; it has a, b" in capsys.readouterr().err


@in_loop
async def test_a_server_that_goes_away_is_missed_and_another_one_is_taken():
    async with aiohttp.ClientSession() as session:
        async with running() as server:
            watch = Watch(LiveEngine(session, server.url))
            assert (await watch.look()).running == 0 and watch.lost_s is None
        for _ in range(2):
            with pytest.raises(LiveError, match="is the server running"):
                await watch.look()
        assert watch.lost_s is not None and watch.model == ""
        async with running() as server:
            watch.server = LiveEngine(session, server.url)
            assert (await watch.look()).running == 0 and watch.lost_s is None and watch.model == "tiny"


@in_loop
async def test_an_engine_that_is_not_ready_shows_no_zeros(monkeypatch):
    async def json_of(self, path):
        return {"engines": [{"id": "default"}]} if path == "/engine/fleet" else {"plan": {}, "engine": None}

    monkeypatch.setattr(LiveEngine, "json", json_of)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(LiveError, match="is not ready yet: wait for its /ready"):
            await Watch(LiveEngine(session, "http://127.0.0.1:1")).look()


@in_loop
async def test_q_leaves_and_the_terminal_is_as_before(monkeypatch):
    keyboard, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    with open(keyboard, "wb", buffering=0) as keyboard, open(terminal, "rb", buffering=0) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        left = asyncio.Event()
        with keys(left):
            keyboard.write(b"q")
            await left.wait()
        assert termios.tcgetattr(terminal) == before


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["--url", "http://127.0.0.1:1", "--once"], 1, "is the server running?"),
        (["--url", "nonsense", "--once"], 1, "nonsense"),
        ([], 2, "stdout is no terminal; add --once or --json"),
        (["--interval", "0"], 2, "expected a number of at least 0.1"),
    ],
)
def test_what_cannot_be_watched_is_one_line(words, status, says, capsys):
    assert main(["top", *words]) == status
    shown = capsys.readouterr()
    assert says in shown.err and len(shown.err.splitlines()) == 1 and shown.out == ""
