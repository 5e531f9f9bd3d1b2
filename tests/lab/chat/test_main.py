"""``engine chat`` against a server."""

import asyncio
import io
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from tests.service.fakes import says, text_of

from engine.cli.main import main
from engine_lab.chat.prompt import read_message


class Typed:
    """Somebody who types lines; ``KeyboardInterrupt`` is Ctrl-C. In the end it is Ctrl-D."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self.lines = iter(lines)

    def __call__(self, prompt: str) -> str:
        line = next(self.lines, EOFError)
        if isinstance(line, str):
            return line
        raise line


@pytest.fixture
def terminal(monkeypatch):
    """Lines that are typed, one after the other."""

    def typed(*lines: str | type[BaseException]) -> None:
        monkeypatch.setattr("builtins.input", Typed(*lines))
        for stream in (sys.stdin, sys.stdout):
            monkeypatch.setattr(stream, "isatty", lambda: True)

    return typed


def questions(served) -> list[str]:
    """The prompts that reached the engine."""
    return [text_of(request.prompt) for request in served.running.client.requests]


def test_a_pipe_gets_the_answer_alone(served, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("What is a list?\n"))
    assert main(["chat", "--url", f"{served.url}/v1", "--params", "seed=7"]) == 0
    assert capsys.readouterr().out == "Hello world\n"
    assert served.running.client.requests[0].sampling.seed == 7


def test_without_a_url_it_asks_the_server_at_the_usual_port(served, monkeypatch, capsys):
    monkeypatch.setattr("engine_lab.chat.main.DEFAULT_URL", served.url)
    monkeypatch.setattr("sys.stdin", io.StringIO("What is a list?"))
    assert main(["chat"]) == 0 and capsys.readouterr().out == "Hello world\n"
    monkeypatch.setattr("engine_lab.chat.main.DEFAULT_URL", f"{served.url}/elsewhere")
    monkeypatch.setattr("sys.stdin", io.StringIO("What is a list?"))
    assert main(["chat"]) == 1
    assert "answered 404" in (shown := capsys.readouterr().err) and "--model or an override starts one" in shown


def test_a_conversation_goes_on_after_every_mistake(served, terminal, capsys):
    terminal("first", "/params temperature=9", "lost", "/params temperature=", "/nothing", "", " /second", "/why")
    assert main(["chat", "--url", served.url]) == 0
    shown = capsys.readouterr().out
    assert shown.count("· ITL P50") == 2
    assert "got 9" in shown and "no command '/nothing'" in shown
    assert "unattributed" in shown and "cause: " in shown
    first, second = questions(served)
    assert second.startswith(first.removesuffix("\n")) and "Hello world" in second and "/second" in second
    assert "lost" not in second


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """A shell's background jobs ignore Ctrl-C, and so does what they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_stops_an_answer_which_is_kept_as_far_as_it_came(served, terminal, capsys, ctrl_c):
    client = served.running.client
    client.script, client.hold_before = says("one two three"), 8

    async def press_ctrl_c() -> None:
        await client.holding.wait()
        os.kill(os.getpid(), signal.SIGINT)
        await client.abort_seen.wait()
        client.hold_before = None

    pressed = asyncio.run_coroutine_threadsafe(press_ctrl_c(), served.loop)
    terminal("count", "go on", KeyboardInterrupt)
    assert main(["chat", "--url", served.url]) == 130
    pressed.result(10)
    assert "stopped" in capsys.readouterr().out
    (aborted,) = {name for name, _ in client.aborted}
    assert aborted == client.requests[0].request_id
    kept = questions(served)[1].partition("assistant\n")[2].partition("<|im_end|>")[0].strip()
    assert "one two three".startswith(kept)


def test_a_message_of_several_lines(terminal):
    terminal('"""one', "", 'three"""', "x", '"""a"""')
    assert read_message("> ") == "one\n\nthree"
    assert (read_message("> "), read_message("> ")) == ("x", "a")


@pytest.mark.parametrize(
    ("words", "question", "status", "says"),
    [
        (["--url", "http://127.0.0.1:1"], "a", 1, "is the server running? (--url)"),
        (["--url", "http://127.0.0.1:1", "drafter=none"], "a", 2, "overrides are for one of its own"),
        (["--url", "http://127.0.0.1:1"], "\n", 2, "nothing on stdin"),
        (["--params", "x"], "a", 2, "--params: 'x': expected NAME=VALUE"),
    ],
)
def test_what_cannot_start_says_why(words, question, status, says, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(question))
    assert main(["chat", *words]) == status
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_without_a_server_it_starts_one(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("What does json.dumps do?"))
    assert main(["chat", "--params", "temperature=0 max_tokens=8", "device=cpu"]) == 0
    assert capsys.readouterr().out.startswith("Serialize")
