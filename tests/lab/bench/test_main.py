from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from engine.cli.main import main
from engine_lab.bench import main as bench
from engine_lab.bench.busy import is_local
from engine_lab.bench.options import BenchOptions, add_flags, options_of
from engine_lab.bench.probe import ProbeError, calibrate
from engine_lab.bench.report import notes
from engine_lab.bench.target import Target, open_session

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def parse_options(argv: list[str]) -> BenchOptions:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return options_of(parser.parse_args(argv))


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


class FakeServer:
    """Speaks as much of the OpenAI API as a load generator hears; a character is a token."""

    def __init__(self, usage: bool = True, tokenize: str | None = None, fail_every: int = 0) -> None:
        self.usage, self.tokenize, self.fail_every = usage, tokenize, fail_every
        self.machine: list[dict[str, Any]] = []
        """What ``/engine/stats`` says, one answer after the other; none: it is another server."""
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()

    def app(self) -> web.Application:
        app = web.Application()
        if self.machine:
            app.router.add_get("/engine/stats", self.stats)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/chat/completions", self.complete)
        app.router.add_post("/v1/completions", self.complete)
        if self.tokenize is not None:
            app.router.add_post("/tokenize", self.count)
        return app

    async def stats(self, request: web.Request) -> web.Response:
        return web.json_response({"running": 0, "machine": self.machine.pop(0)})

    async def models(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("Authorization"))
        return web.json_response({"data": [{"id": "fake-model"}]})

    async def count(self, request: web.Request) -> web.Response:
        text = (await request.json()).get(self.tokenize)
        if text is None:
            return web.json_response({"error": "no such field"}, status=400)
        return web.json_response({"tokens": list(range(len(text) // 2))})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.add(request.headers.get("Authorization"))
        prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}
        if not body["stream"]:
            return web.json_response({"choices": [], "usage": usage if self.usage else None})
        if self.fail_every and len(self.bodies) % self.fail_every == 0:
            return web.json_response({"error": {"message": "queue is full"}}, status=429)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await response.write(event(choices=[{"delta": {"content": "x"}}]))
        await response.write(event(choices=[{"delta": {}, "finish_reason": "length"}]))
        if self.usage and body.get("stream_options", {}).get("include_usage"):
            await response.write(event(choices=[], usage=usage))
        await response.write(b"data: [DONE]\n\n")
        return response


def measure(fake: FakeServer, *argv: str) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        async with TestServer(fake.app()) as server:
            return await bench.measure(parse_options(["--url", str(server.make_url("/v1")), *argv]))

    return asyncio.run(run())


def test_a_closed_loop_run_measures_every_request():
    fake = FakeServer()
    argv = ["--requests", "12", "--concurrency", "3", "--output-tokens", "6", "--warmup", "2", "--api-key", "k"]
    result = measure(fake, *argv)
    assert result["requests"] == {"sent": 12, "ok": 12, "failed": {}, "left": 0}
    assert result["config"]["model"] == "fake-model"
    assert result["tokens"]["output"] == 72
    assert result["metrics"]["ttft_ms"]["count"] == 12
    assert result["metrics"]["tpot_ms"]["count"] == 12
    assert len(fake.bodies) == 12 + 2 + 2  # measured, warm-up, calibration by usage
    assert fake.keys == {"Bearer k"}


def test_a_server_that_says_how_its_threads_waited_is_believed():
    fake = FakeServer()
    fake.machine = [
        {"at_s": at, "cpus": 2, "ran_s": ran, "waited_s": waited, "others_s": others, "stolen_s": 0.0}
        for at, ran, waited, others in ((0.0, 0.0, 0.0, 0.0), (10.0, 6.0, 2.0, 9.0))
    ]
    result = measure(fake, "--requests", "1", "--warmup", "0")
    assert result["machine"]["whose"] == "the engine" and result["machine"]["waiting"] == 0.25
    line = "machine     busy: the engine spent 25% of its time without a core, others used 0.9 of 2 CPUs"
    assert line in notes(result)
    result["machine"]["waiting"] = 0.01
    assert not any("machine" in line for line in notes(result))


def test_of_a_local_server_that_says_nothing_this_client_says_how_it_waited():
    found = measure(FakeServer(), "--requests", "1")["machine"]
    assert found["whose"] == "this client" and found["cpus"] >= 1


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://[::1]:8000", True),
        ("http://localhost", True),
        ("http://192.0.2.7:8000", False),
        ("https://example.com", False),
    ],
)
def test_a_server_elsewhere_says_nothing_of_this_machine(url, local):
    assert is_local(url) == local


def test_an_open_loop_run_sends_on_a_seeded_schedule():
    argv = ["--rate", "400", "--requests", "10", "--output-tokens", "2", "--seed", "3"]
    first, second = measure(FakeServer(), *argv), measure(FakeServer(), *argv)
    assert first["requests"]["ok"] == 10
    dues = [
        [round(r["scheduled_s"] - x["records"][0]["scheduled_s"], 9) for r in x["records"]] for x in (first, second)
    ]
    assert dues[0] == pytest.approx(dues[1])
    assert len(set(dues[0])) == 10


def test_what_is_not_asked_for_is_not_sent():
    fake = FakeServer()
    measure(fake, "--requests", "1")
    assert "ignore_eos" not in fake.bodies[-1]
    measure(fake, "--requests", "1", "--ignore-eos", "--temperature", "0.7")
    assert fake.bodies[-1]["ignore_eos"] is True
    assert fake.bodies[-1]["temperature"] == 0.7


def test_prompt_ids_go_to_the_completions_endpoint_with_exact_lengths():
    fake = FakeServer()
    result = measure(fake, "--requests", "3", "--prompt-ids", "500", "--prompt-tokens", "33")
    assert {len(body["prompt"]) for body in fake.bodies} == {33}
    assert result["config"]["prompt_length_from"] == "exact token ids"


def test_refused_requests_are_counted_by_kind_with_the_servers_words():
    result = measure(FakeServer(fail_every=3), "--requests", "9", "--warmup", "0", "--prompt-ids")
    assert result["requests"]["ok"] == 6
    assert result["requests"]["failed"]["http_429"]["count"] == 3
    assert "queue is full" in result["requests"]["failed"]["http_429"]["example"]


@pytest.mark.parametrize("flag", ["--url", "--versus"])
def test_an_url_without_a_scheme_is_wrong_usage(flag, capsys):
    assert main(["bench", flag, "127.0.0.1:8000"]) == 2
    assert f"{flag} 127.0.0.1:8000: expected http://HOST:PORT" in capsys.readouterr().err


def test_a_server_that_refuses_every_warm_up_is_not_measured():
    server = FakeServer(fail_every=1)
    with pytest.raises(ProbeError, match=r"no warm-up request succeeded: http_429: .*queue is full"):
        measure(server, "--requests", "9", "--warmup", "2", "--prompt-ids")
    assert len(server.bodies) == 2


def test_a_server_without_usage_leaves_tokens_unknown():
    result = measure(FakeServer(usage=False), "--requests", "2")
    assert result["tokens"]["output"] is None
    assert result["metrics"]["tpot_ms"]["count"] == 0
    assert result["metrics"]["inter_chunk_ms"]["count"] > 0
    assert result["config"]["prompt_length_from"].startswith("assumed")


def test_a_tokenizer_counts_what_the_server_does_not(tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer(WordLevel({"x": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = Split("", "isolated")  # a character is a token
    tokenizer.save(str(path))
    argv = ["--requests", "2", "--output-tokens", "7", "--prompt-tokens", "40", "--tokenizer", str(tmp_path)]
    result = measure(FakeServer(usage=False), *argv)
    assert result["tokens"]["output"] == 14
    assert result["metrics"]["tpot_ms"]["count"] == 2
    assert result["config"]["chars_per_token"] == 1.0


@pytest.mark.parametrize(
    ("fake", "chars", "source"),
    [
        (FakeServer(tokenize="prompt"), 2.0, "the server's /tokenize"),
        (FakeServer(tokenize="content"), 2.0, "the server's /tokenize (llama.cpp)"),
        (FakeServer(), 1.0, "usage of two requests sent before the run"),
    ],
)
def test_token_lengths_are_calibrated_by_the_best_the_server_offers(fake, chars, source):
    async def run() -> Any:
        async with TestServer(fake.app()) as server, open_session(10) as session:
            target = Target(str(server.make_url("")).rstrip("/"), "m", "completions")
            return await calibrate(session, target, "word " * 100, None)

    found = asyncio.run(run())
    assert (found.chars_per_token, found.source) == (chars, source)


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(ProbeError, match="is the server running"):
        asyncio.run(bench.measure(parse_options(["--url", "http://127.0.0.1:1"])))


def result_with(valid: bool, ok: int) -> Any:
    async def fake_measure(options: Any) -> dict[str, Any]:
        from engine_lab.bench.record import RequestRecord
        from engine_lab.bench.result import summarise

        records = [RequestRecord(0, 0.0, 0.0, 0.2, (0.1,), 0.2, 1, 0, 1, "stop", "" if ok else "timeout")]
        config = {"model": "m", "url": "u", "load": "l", "prompt_length_from": "p"}
        return summarise(records, [0.0 if valid else 1.0], None, config)

    return fake_measure


@pytest.mark.parametrize(("valid", "ok", "status"), [(True, 1, 0), (False, 1, 3), (True, 0, 1)])
def test_the_exit_status_says_whether_the_run_counts(monkeypatch, capsys, tmp_path, valid, ok, status):
    monkeypatch.setattr(bench, "measure", result_with(valid, ok))
    path = tmp_path / "result.json"
    assert main(["bench", "--json", str(path)]) == status
    assert json.loads(path.read_text())["valid"] is valid
    assert ("INVALID" in capsys.readouterr().out) is not valid


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--prompt-tokens", "lots"], "'lots': expected a whole number"),
        (["--slo", "ttft=1"], "'ttft=1': expected ttft"),
        (["--sweep", "--trace", "x"], "--sweep and --trace exclude each other"),
        (["--sweep", "--rate", "2"], "--sweep finds rates by itself"),
        (["--rate", "4,2"], "expected rates that grow"),
        (["--arrivals", "gamma:2"], "expected a --rate beside it"),
        (["--rate", "1", "--arrivals", "burst:1.5"], "'burst:1.5': expected poisson, constant, gamma:SHAPE"),
        (["--leave", "2@1"], "'2@1': expected SHARE@S"),
        (["--turns", "3", "--prompt-ids"], "--turns needs answers as texts"),
        (["--prompt-tokens", "lognormal:200,100"], "SIGMA is the standard deviation of the logarithm"),
        (["--json", "/nonexistent/file"], "--json /nonexistent/file: expected a file that can be written"),
        (["--html", "/nonexistent/file"], "--html /nonexistent/file: expected a file that can be written"),
        (["--trace", "/nonexistent/file"], "/nonexistent/file: no such file"),
        (["--workload", "/nonexistent/file"], "--workload /nonexistent/file: expected TOML"),
        (["--prompt-ids", "--endpoint", "chat"], "needs --endpoint completions"),
        (["--shared-prefix", "1.5"], "expected a share from 0 to 1"),
        (["--requests", "0"], "expected a whole number of at least 1"),
        (["--concurency", "2"], "no such flag --concurency; did you mean '--concurrency'"),
        (["drafter=none"], "unexpected 'drafter=none'"),
        (["--text", "/nonexistent/file"], "expected a file of UTF-8 text"),
        (["--tokenizer", "/nonexistent/file"], "expected a tokenizer.json"),
        (["--compare", "/nonexistent/a", "/nonexistent/b"], "--compare /nonexistent/a"),
    ],
)
def test_wrong_usage_is_one_message_and_status_2(capsys, argv, words):
    assert main(["bench", *argv]) == 2
    shown = capsys.readouterr().err
    assert words in shown and len(shown.splitlines()) == 1


def test_help_explains_every_flag_and_tells_the_lengths_it_defaults_to(capsys):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert [action.option_strings for action in parser._actions if not action.help] == []
    assert main(["bench", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "tokens of a prompt (128)" in text and "most tokens of an answer (64)" in text


def test_the_load_generator_does_not_import_torch():
    code = "import sys, engine_lab.bench.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
