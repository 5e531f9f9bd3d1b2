"""``engine calibrate`` against two models of a server that says what a test wants."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.http.gateway.fakes import Backend, Exchange

from engine.cli.main import main
from engine.service.confidence import Calibration, read_calibration

PROMPTS = 60


async def answers(exchange: Exchange) -> None:
    """The smaller model is right about numbers above 30, and the surer of its answer the larger they are."""
    body = json.loads(exchange.asked.body)
    number = int(body["messages"][-1]["content"])
    right = body["model"] == "large" or number >= 30
    choice: dict[str, object] = {"message": {"content": f"{number if right else 'none'}"}}
    if body.get("logprobs"):
        choice["logprobs"] = {"content": [{"logprob": -one} for one in (0.0, 60.0 - number, 0.0, 500.0)]}
    await exchange.reply(200, json.dumps({"choices": [choice]}).encode())


async def without_logprobs(exchange: Exchange) -> None:
    await exchange.reply(200, b'{"choices": [{"message": {"content": "x"}}]}')


async def refuses(exchange: Exchange) -> None:
    await exchange.refuse(404, "model_not_found")


@contextmanager
def served(backend: Backend) -> Iterator[str]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(backend.start(), loop).result(10)
        yield backend.url
        asyncio.run_coroutine_threadsafe(backend.stop(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def words(url: str, prompts: Path, out: Path, *more: str) -> list[str]:
    files = ["--prompts", str(prompts), "--out", str(out)]
    return ["calibrate", url, "--small", "small", "--large", "large", *files, *more]


@pytest.mark.parametrize("kind", ["prompts.txt", "prompts.jsonl"])
def test_the_table_says_from_which_confidence_on_the_models_agree(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / kind, tmp_path / "table.json"
    lines = [str(i) if kind.endswith("txt") else json.dumps({"question": str(i)}) for i in range(PROMPTS)]
    prompts.write_text("\n".join(lines))
    with served(Backend("a", then=answers)) as url:
        assert main(words(url, prompts, out, "--tokens", "3", "--quantile", "0")) == 0
    found = msgspec.json.decode(out.read_bytes(), type=Calibration)
    assert (found.model, found.reference, found.prompts, found.tokens) == ("small", "large", PROMPTS, 3)
    assert found == read_calibration("key", str(out)), "a gateway takes it"
    assert found.agreement == ((-60.0, 0.0), (-40.0, 0.5), (-20.0, 1.0))
    assert "33.3%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (Backend("a", then=without_logprobs), "small gives no log probabilities"),
        (Backend("a", then=refuses), "answered 404"),
    ],
    ids=["logprobs", "404"],
)
def test_what_a_server_does_not_say_is_told(
    backend: Backend, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts").write_text("\n".join(map(str, range(PROMPTS))))
    with served(backend) as url:
        assert main(words(url, tmp_path / "prompts", tmp_path / "out")) == 1
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("lines", "more", "said"),
    [("1\n2\n", (), "2 prompts; expected at least 20"), ("1\n" * 30, ("--quantile", "1"), "expected less than 1")],
)
def test_wrong_usage_is_told_before_anything_is_asked(
    lines: str, more: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts").write_text(lines)
    assert main(words("http://127.0.0.1:1", tmp_path / "prompts", tmp_path / "out", *more)) == 2
    assert said in capsys.readouterr().err
