"""A task in a sandbox is ended by the kernel when it breaks a limit, and the sandbox goes on with the next."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.service.sandbox import process
from engine.service.sandbox.frames import packed
from engine.service.sandbox.process import LimitBroken, Sandbox, SandboxEnded

from .fakes import in_loop

TASKS = """
import os, sys, time
from engine.service.sandbox import child

def answer(frame):
    match bytes(frame):
        case b"loop":
            while True: pass
        case b"memory":
            return bytes(2**30)
        case b"slow":
            time.sleep(0.3)
        case b"exit":
            os._exit(3)
        case b"open":
            try: open("/etc/hostname")
            except OSError as error: return error.strerror.encode()
        case b"environment":
            return " ".join(sorted(os.environ)).encode()
    return bytes(frame)

if __name__ == "__main__":
    sys.exit(child.main(answer, lambda: answer(b"")))
"""


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    (tmp_path / "tasks_of_a_test.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Sandbox("tasks_of_a_test", 256)
    yield made
    made.close()


def ask(sandbox: Sandbox, task: str) -> str:
    return sandbox.ask_now(task.encode(), 0.2, 1000).decode()


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ("loop", "took more than 0.2 s of CPU time"),
        ("memory", "took more than 256 MB of memory"),
        ("exit", "crashed (exit code 3)"),
        ("x" * 1001, "answered too much"),
    ],
)
def test_a_task_that_breaks_a_limit_is_ended_and_the_next_one_is_answered(
    sandbox: Sandbox, task: str, why: str
) -> None:
    assert ask(sandbox, "hello") == "hello"
    first = sandbox.pids
    with pytest.raises(SandboxEnded) as ended:
        ask(sandbox, task)
    assert str(ended.value) == why
    assert ask(sandbox, "hello again") == "hello again"
    assert sandbox.pids != first


def test_a_task_can_open_no_file_and_sees_no_secret(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert ask(sandbox, "open") == "Too many open files"
    assert "HF_TOKEN" not in ask(sandbox, "environment")


def test_a_child_that_is_stopped_is_given_up(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(sandbox, "hello") == "hello"
    os.kill(sandbox.pids[0], signal.SIGSTOP)
    monkeypatch.setattr(process, "WALL_S", 0.1)
    with pytest.raises(SandboxEnded, match="did not answer"):
        ask(sandbox, "hello")
    monkeypatch.undo()
    assert ask(sandbox, "hello") == "hello"


def test_a_reply_larger_than_agreed_is_not_read(sandbox: Sandbox) -> None:
    assert ask(sandbox, "hello") == "hello"
    (child,) = sandbox._children
    assert child._connection is not None
    with child._connection:  # open until the end: a child whose connection closes ends, and is replaced
        child._connection, theirs = socket.socketpair()
        theirs.sendall(packed(b"x" * 2000))
        with pytest.raises(SandboxEnded, match="too much"):
            ask(sandbox, "hello")


def test_a_closed_sandbox_leaves_no_process_and_keeps_nobody_waiting(sandbox: Sandbox) -> None:
    assert ask(sandbox, "hello") == "hello"
    (pid,) = sandbox.pids
    with ThreadPoolExecutor(2) as pool:
        # The second one waits for its turn.
        waiting = [pool.submit(sandbox.ask_now, b"loop", 60.0, 10) for _ in range(2)]
        while not sandbox._waiting:
            time.sleep(0.01)  # bounded by the limit on a test
        sandbox.close()
        for one in waiting:
            with pytest.raises(SandboxEnded):
                one.result(10)
    assert not is_there(pid)
    with pytest.raises(SandboxEnded, match="was closed"):
        ask(sandbox, "hello")


@in_loop
async def test_a_closed_sandbox_keeps_no_coroutine_waiting(sandbox: Sandbox) -> None:
    await sandbox.ask(b"hello", 1.0, 10)
    (pid,) = sandbox.pids
    waiting = [asyncio.create_task(sandbox.ask(b"loop", 60.0, 10)) for _ in range(2)]
    await asyncio.sleep(0.1)
    sandbox.close()
    assert all(isinstance(one, SandboxEnded) for one in await asyncio.gather(*waiting, return_exceptions=True))
    assert not is_there(pid)


@in_loop
async def test_answers_stay_with_their_questions_whoever_leaves_in_between(sandbox: Sandbox) -> None:
    async def asked(text: str, leaves: bool) -> str | None:
        asking = asyncio.create_task(sandbox.ask(text.encode(), 1.0, 1000))
        if leaves:
            await asyncio.sleep(0.001 * (len(text) % 4))
            asking.cancel()
            await asyncio.wait({asking})
            return None
        return (await asking).decode()

    await sandbox.ask(b"hello", 1.0, 10)
    pids = sandbox.pids
    texts = ["x" * number for number in range(1, 200)]
    answers = await asyncio.gather(*(asked(text, number % 3 == 0) for number, text in enumerate(texts)))
    assert answers == [None if number % 3 == 0 else text for number, text in enumerate(texts)]
    assert sandbox.pids == pids
    assert ask(sandbox, "hello") == "hello"


@in_loop
async def test_a_child_that_is_killed_costs_nobody_an_answer(sandbox: Sandbox) -> None:
    assert await sandbox.ask(b"hello", 1.0, 10) == b"hello"
    asking = asyncio.create_task(sandbox.ask(b"slow", 1.0, 10))
    await asyncio.sleep(0.1)
    os.kill(sandbox.pids[0], signal.SIGKILL)
    assert await asking == b"slow"


@in_loop
async def test_a_task_that_always_ends_its_child_is_asked_twice(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxEnded, match=r"crashed \(exit code 3\)") as ended:
        await sandbox.ask(b"exit", 1.0, 10)
    assert not isinstance(ended.value, LimitBroken)
    with pytest.raises(LimitBroken, match="CPU time"):
        await sandbox.ask(b"loop", 0.2, 10)


def test_an_answer_that_an_event_loop_did_not_wait_for_is_nobodys(sandbox: Sandbox) -> None:
    async def leaves() -> None:
        await sandbox.ask(b"hello", 1.0, 10)
        asking = asyncio.create_task(sandbox.ask(b"slow", 1.0, 10))
        await asyncio.sleep(0.05)
        assert not asking.done()

    asyncio.run(leaves())
    assert ask(sandbox, "hello") == "hello"


def test_no_child_outlives_the_process_that_started_it() -> None:
    code = (
        "from engine.service.sandbox.process import Sandbox\n"
        "sandbox = Sandbox('engine.service.body_child', 256)\n"
        "sandbox.start(1.0)[0].result()\n"
        "print(*sandbox.pids, flush=True)\n"
        "input()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_there(pid)
    parent.kill()
    parent.communicate()
    for _ in range(200):
        if not is_there(pid):
            return
        time.sleep(0.05)  # the kernel ends it when it gets to it; bounded
    raise AssertionError("the child is still there")


def is_there(pid: int) -> bool:
    """Whether this process runs; one that is dead and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
