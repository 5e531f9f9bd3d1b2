from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.lab.bench.test_main import FakeServer, event, measure, parse_options
from tests.lab.bench.test_report import printed

from engine_lab.bench import main as bench


class Stalling(FakeServer):
    """Sends a token and no more, from the fourth streamed request on."""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        if sum(body["stream"] for body in self.bodies) < 3:
            return await super().complete(request)
        self.bodies.append(await request.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event(choices=[{"delta": {"content": "x"}}]))
        await asyncio.sleep(60)
        return response


@pytest.mark.parametrize("argv", [(), ("--rate", "500,600"), ("--versus", "http://unused")])
def test_an_interrupted_run_has_a_result_of_what_had_ended(argv):
    fake = Stalling()

    async def run():
        async with TestServer(fake.app()) as server:
            url = str(server.make_url(""))
            flags = [word.replace("http://unused", url) for word in argv]
            flags += ["--url", url, "--warmup", "0", "--prompt-ids"]
            running = asyncio.create_task(bench.measure(parse_options(flags)))
            while len(fake.bodies) < 4:
                await asyncio.sleep(0)
            running.cancel()
            return await running

    result = asyncio.run(run())
    shown = " ".join(printed(bench.rendered(result)).split())
    assert result["interrupted"] and "interrupted: " in shown
    if not argv:  # one at a time
        assert result["requests"]["ok"] == 3


def test_clients_that_leave_are_in_no_latency_and_no_failure():
    argv = ["--requests", "5", "--concurrency", "5", "--warmup", "0", "--prompt-ids", "--slo", "ttft=60s"]
    result = measure(Stalling(), *argv, "--leave", "1@1")
    found = result["requests"]
    assert found["left"] == found["sent"] - found["ok"] >= 2 and found["failed"] == {}
    assert result["goodput"]["share"] == 1.0 and result["metrics"]["e2e_ms"]["count"] == found["ok"]


def test_a_trace_is_played_with_its_lengths_at_the_speed_asked_for(tmp_path):
    path = tmp_path / "trace.csv"
    rows = [f"2024-05-10 00:00:0{i}.0000000,{20 + i},{1 + i}" for i in range(6)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    fake = FakeServer()
    result = measure(fake, "--trace", str(path), "--speed", "50", "--prompt-ids", "--warmup", "0", "--slice", "0.045")
    sent = sorted((len(body["prompt"]), body["max_tokens"]) for body in fake.bodies)
    assert sent == [(20 + i, 1 + i) for i in range(6)]
    dues = [record["scheduled_s"] - result["records"][0]["scheduled_s"] for record in result["records"]]
    assert dues == pytest.approx([0.02 * i for i in range(6)])
    assert [one["requests"] for one in result["slices"]] == [3, 2, 1]
    assert result["client"]["send_limit_ms"] == 5.0
    assert len(measure(FakeServer(), "--trace", str(path), "--speed", "50", "--requests", "4")["records"]) == 4


def test_a_trace_without_times_needs_a_rate(tmp_path):
    turns = [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 12}]
    path = tmp_path / "shared.json"
    path.write_text(json.dumps([{"id": i, "conversations": turns * 2} for i in range(3)]))
    with pytest.raises(ValueError, match="it has no times; expected --rate R beside it"):
        measure(FakeServer(), "--trace", str(path))
    result = measure(FakeServer(), "--trace", str(path), "--rate", "300")
    assert result["requests"]["ok"] == 6
