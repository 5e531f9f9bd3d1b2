"""Programs of ``tools.clients``: what counts as answered."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.attack.client import Reply
from tools.clients.programs import Place, streamed


def place(folder: Path, script: str) -> Place:
    program = folder / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return Place(str(program), "http://127.0.0.1:1/v1", folder)


def test_a_program_says_what_it_printed_and_ends_as_expected(tmp_path: Path) -> None:
    at = place(tmp_path, 'echo "$HOME $MORE $1"; echo 1.2.3 >&2; exit 3')
    assert asyncio.run(at.run("told", code=3, MORE="more")) == f"{tmp_path} more told\n1.2.3\n"
    with pytest.raises(AssertionError, match=r"exit code 3: .* 1\.2\.3"):
        asyncio.run(at.run())
    assert asyncio.run(at.version()) == ""
    assert asyncio.run(place(tmp_path, "echo version 1.2.3").version()) == "1.2.3"


def test_what_a_server_has_started_ends_with_it(tmp_path: Path) -> None:
    async def started() -> int:
        async with place(tmp_path, "sleep 600 & echo $! > child; wait").started():
            while not (child := tmp_path / "child").exists() or not child.read_text():
                await asyncio.sleep(0.01)
            return int(child.read_text())

    pid = asyncio.run(asyncio.wait_for(started(), 60))
    state, end = Path(f"/proc/{pid}/stat"), time.monotonic() + 30.0
    while time.monotonic() < end and state.exists() and state.read_text().split()[2] != "Z":
        time.sleep(0.01)  # it has its signal, and may not have had a core since
    assert not state.exists() or state.read_text().split()[2] == "Z", os.readlink(f"/proc/{pid}/exe")


def test_a_server_that_ends_at_once_is_told_with_its_words(tmp_path: Path) -> None:
    async def asked() -> None:
        async with place(tmp_path, "echo no such model; exit 1").listening():
            pass

    with pytest.raises(AssertionError, match="ended: no such model"):
        asyncio.run(asyncio.wait_for(asked(), 60))


@pytest.mark.parametrize(
    "body",
    [
        b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
        b'data: {"choices": [{"delta": {"content": "a b"}}]}\n\ndata: {"choices": []}\n\ndata: [DONE]\n\n',
        b'event: message_start\ndata: {"message": {}}\n\nevent: content_block_delta\n'
        b'data: {"delta": {"type": "text_delta", "text": "a"}}\n\ndata: {"delta": {"text": " b"}}\n\n'
        b'data: {"delta": {"stop_reason": "end_turn"}}\n\n',
    ],
    ids=["chat", "messages"],
)
def test_the_text_of_a_stream(body: bytes) -> None:
    assert streamed(Reply(200, {}, body)) == "a b"


NPM_CLIENT = "openai@6.49.0"


@pytest.mark.slow
def test_the_official_client_for_javascript_gets_what_it_asks_for(tmp_path: Path) -> None:
    """Where npm is there and may install."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm")
    install = [
        npm,
        "install",
        "--silent",
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
        "--fetch-retries=0",
        NPM_CLIENT,
    ]
    installed = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    if installed.returncode:
        pytest.skip(f"npm cannot install: {installed.stderr.strip()[:200]}")
    tried = [sys.executable, "-m", "tools.clients", "--node", str(tmp_path)]
    done = subprocess.run(tried, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "| clients: openai (node) 6" in done.stdout, done.stdout + done.stderr
