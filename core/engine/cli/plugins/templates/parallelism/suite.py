import socket
import sys
from collections.abc import Iterator

import pytest

from engine.cli.plugins.templates.parallelism.plugin import MineParallelism, MineParallelismConfig
from engine.contracts.parallelism import Launcher, LauncherError, StartedWorker, WorkerJob, WorkerStart
from engine.testing.context import build_context

ECHO = """\
import os, socket, sys
ours = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
while said := ours.recv(100):
    ours.sendall(os.environ["SAYS"].encode() + said)
"""
JOBS = [WorkerJob(rank, {"SAYS": f"rank {rank}: "}) for rank in (1, 2)]


def unused(connection: socket.socket) -> None:
    """Workers of this launcher are processes."""


def start(*command: str) -> WorkerStart:
    return WorkerStart(command, unused)


@pytest.fixture
def launcher() -> Iterator[MineParallelism]:
    made = MineParallelism(MineParallelismConfig(tp=3), build_context())
    yield made
    made.close()


def ask(worker: StartedWorker) -> bytes:
    worker.connection.sendall(b"hello")
    return worker.connection.recv(100)


def test_it_fulfils_the_contract(launcher: MineParallelism) -> None:
    assert isinstance(launcher, Launcher)


def test_every_rank_has_a_worker_after_a_connection_of_its_own(launcher: MineParallelism) -> None:
    workers = launcher.launch(JOBS, start(sys.executable, "-c", ECHO), 10.0)
    assert [worker.rank for worker in workers] == [1, 2]
    assert [ask(worker) for worker in workers] == [b"rank 1: hello", b"rank 2: hello"]
    assert [worker.ended() for worker in workers] == [None, None]


def test_a_worker_that_is_killed_has_ended_and_the_others_live(launcher: MineParallelism) -> None:
    first, second = launcher.launch(JOBS, start(sys.executable, "-c", ECHO), 10.0)
    first.kill()
    assert first.ended() == "signal 9" and first.connection.recv(1) == b""
    assert ask(second) == b"rank 2: hello"


def test_nothing_is_left_after_close(launcher: MineParallelism) -> None:
    workers = launcher.launch(JOBS, start(sys.executable, "-c", ECHO), 10.0)
    launcher.close()
    assert [worker.ended() for worker in workers] == ["signal 9", "signal 9"]


def test_nothing_is_started_for_one_rank(launcher: MineParallelism) -> None:
    assert launcher.launch([], start(sys.executable), 10.0) == ()


def test_what_cannot_be_started_is_an_error(launcher: MineParallelism, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LauncherError, match="rank 1 could not be started"):
        launcher.launch(JOBS, start("/no/such/python"), 10.0)
