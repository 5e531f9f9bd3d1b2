"""``/engine/findings``: commands of plugins that read the engine, run for the page."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from engine.contracts.command import CommandProvider
from engine.http import finders

from ..service.fakes import in_loop
from .fakes import Running, running
from .test_server import error_of

PATH = "/engine/findings/look"
LOOKS = """
import json, os, sys, urllib.request
*words, flag, url = sys.argv[1:]
headers = {"Authorization": "Bearer " + os.environ["ENGINE_API_KEY"]}
assert flag == "--url" and urllib.request.urlopen(urllib.request.Request(url + "/engine/stats", headers=headers))
print(json.dumps({"findings": [{"cause": " ".join(words), "says": "It reads."}]}))
"""
WAITS = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[2]).write_text(str(os.getpid()))
time.sleep(60)
"""


def offer(server: Running, monkeypatch: pytest.MonkeyPatch, script: str, *flags: str) -> None:
    monkeypatch.setattr(finders, "COMMAND", (sys.executable, "-c", script))
    provider = CommandProvider("look", "engine_mine:LOOK", "look at the engine", finds_with=flags)
    server.server.state.finders.commands = {"look": provider}


async def until_written(file: Path) -> int:
    while not (file.exists() and file.read_text()):
        await asyncio.sleep(0.01)
    return int(file.read_text())


@in_loop
async def test_a_command_reads_the_engine_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(api_key="secret") as server:
        offer(server, monkeypatch, LOOKS, "--json", "--window", "5")
        key = "Authorization: Bearer secret"
        _, _, listed = await server.get("/engine/findings", key)
        assert json.loads(listed) == {"commands": [{"name": "look", "doc": "look at the engine"}]}
        status, _, found = await server.post(PATH, b"", key)
        assert (status, json.loads(found)["findings"][0]["cause"]) == (200, "look --json --window 5")


@in_loop
@pytest.mark.parametrize(
    ("path", "script", "status", "says"),
    [
        ("/engine/findings/other", "", 404, "No command 'other' prints findings"),
        (PATH, "import sys; sys.exit('engine look: the engine cannot be read')", 500, "the engine cannot be read"),
        (PATH, "raise SystemExit(3)", 500, "engine look ended with 3"),
        (PATH, "print('x' * (1 << 20))", 500, "engine look printed more than 1048576 bytes"),
        (PATH, "print('[]')", 500, "engine look printed no findings"),
        (PATH, """print('{"findings": [{"cause": "none"}]}')""", 500, "missing required field `says`"),
    ],
)
async def test_what_goes_wrong_is_said(
    path: str, script: str, status: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as server:
        offer(server, monkeypatch, script)
        answered, _, data = await server.post(path, b"")
        assert answered == status and says in error_of(data)["message"]


@in_loop
async def test_a_page_of_another_server_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as server:
        offer(server, monkeypatch, LOOKS)
        status, _, data = await server.post(PATH, b"", "Origin: http://other.example", "Content-Type: text/plain")
        assert status == 415 and "Content-Type" in error_of(data)["message"]


@in_loop
async def test_a_draining_server_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as server:
        offer(server, monkeypatch, LOOKS)
        server.server.state.admission.draining = True
        status, _, data = await server.post(PATH, b"")
        assert status == 503 and error_of(data)["code"] == "draining"


@in_loop
async def test_what_a_command_has_started_ends_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    starts = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAITS!r}, *sys.argv[1:]])"
    async with running() as server:
        monkeypatch.setattr(finders, "LIMIT_S", 2.0)
        offer(server, monkeypatch, starts, str(tmp_path / "pid"))
        status, _, data = await server.post(PATH, b"")
        assert status == 500 and "did not end" in error_of(data)["message"]
        pid = await until_written(tmp_path / "pid")
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.01)


@in_loop
async def test_one_command_runs_at_a_time_and_ends_with_who_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with running() as server:
        offer(server, monkeypatch, WAITS, str(tmp_path / "pid"))
        first = asyncio.create_task(server.post(PATH, b""))
        pid = await until_written(tmp_path / "pid")
        status, _, data = await server.post(PATH, b"")
        assert status == 409 and "engine look is running already" in error_of(data)["message"]
        first.cancel()
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.01)
        offer(server, monkeypatch, LOOKS)
        monkeypatch.setenv("ENGINE_API_KEY", "none is asked for")
        while (await server.post(PATH, b""))[0] == 409:
            await asyncio.sleep(0.01)
        assert (await server.post(PATH, b""))[0] == 200
