"""An engine that is there for one conversation: started, waited for, ended."""

import asyncio
import os
import sys
from pathlib import Path

import pytest
from tests.service.fakes import DirectRouter, MemoryExporter, ScriptedClient, in_loop, make_plan, make_tokenizer

from engine.http.server import Server
from engine_lab.chat.own_server import READY, StartError, own_server


@pytest.fixture
def python(tmp_path, monkeypatch):
    """What is started in place of Python, which leaves the words it was given and its process id."""

    def stands_in(script: str) -> Path:
        program, words = tmp_path / "python", tmp_path / "words"
        program.write_text(f'#!/bin/sh\necho "$@" >{words}\necho $$ >{words}.pid\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        return words

    return stands_in


def test_it_tells_the_phases_waits_until_it_is_ready_and_ends_it(python):
    ready = "ready: m at http://127.0.0.1:4711/v1"
    words = python(f"echo 'starting: load weights' >&2; sleep 0.3; echo '{ready}' >&2; exec sleep 60")
    phases: list[str] = []
    with own_server(["drafter=none"], phases.append) as url:
        assert url == "http://127.0.0.1:4711" and set(phases) == {"load weights"}
        assert words.read_text() == "-P -m engine.cli.main serve drafter=none --host 127.0.0.1 --port 0\n"
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path(f"{words}.pid").read_text()), 0)


def test_what_keeps_it_from_starting_is_said(python):
    python("echo 'starting: plan memory' >&2; echo 'no such drafter: nothing' >&2; exit 2")
    with pytest.raises(StartError, match=r"^no such drafter: nothing$") as raised, own_server([], print):
        raise AssertionError("it is not ready")
    assert raised.value.status == 2


@in_loop
async def test_what_it_waits_for_is_what_a_server_says():
    said: asyncio.Queue[str] = asyncio.Queue()
    server = Server(
        make_plan(),
        {"default": ScriptedClient()},
        DirectRouter(),
        [MemoryExporter()],
        make_tokenizer(),
        say=said.put_nowait,
    )
    running = asyncio.create_task(server.run())
    try:
        while not (found := READY.search(await said.get())):
            pass
        assert found[1] == f"http://127.0.0.1:{server.port}"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.close()
