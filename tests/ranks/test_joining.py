"""Workers that come by themselves: started by hand, or with the same command for every rank."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tools.benchmarks.dying_ranks import BACK_S, served

from engine import LLM
from engine.assembly.assemble import assemble
from engine.contracts.config import Joining
from engine.contracts.parallelism import TOKEN, WELCOME, LauncherError, WorkerJob
from engine.ranks.link import Link, to_workers
from engine.ranks.messages import Assignment, Beat, End, FromWorker, Hello, Present
from engine.startup.fingerprint import versions
from engine.startup.worker import join
from engine_plugins.parallelism import listening
from engine_plugins.parallelism.env import EnvConfig
from engine_plugins.parallelism.listening import Listener
from tests.selection import few

ROOT = Path(__file__).resolve().parents[2]
ENGINE = (sys.executable, "-m", "engine.cli.main")
COMMON = ("parallelism.tp=2", "communicator=shm", "parallelism.timeout_s=5")


def free_port() -> int:
    """Below those that the system gives to other sockets before it is taken."""
    for port in random.sample(range(10_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port")


def start(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*ENGINE, *words], cwd=cwd, env={**os.environ, **environment}, stderr=subprocess.PIPE)


async def assert_served(*overrides: str, pid: int, again: bool) -> list[int]:
    """Two ranks serve; ``again``: when rank 0 dies, the process of rank 1 joins the next one. Returns its children."""
    async with served(*COMMON, *overrides) as engine:
        first = await engine.generate()
        workers = children(pid)
        assert engine.client.info is not None and len(engine.client.info.ranks) == 2
        assert engine.client.info.ranks[1].place == "at 127.0.0.1"
        if not again:
            return workers
        os.kill(engine.client.info.pid, signal.SIGKILL)
        before = engine.client.info
        async with asyncio.timeout(BACK_S):
            while not engine.client.alive or engine.client.info is before:
                await asyncio.sleep(0.01)
        assert await engine.generate() == first
        assert children(pid) != workers, "each engine has workers of its own"
        return children(pid)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def assert_ended(process: subprocess.Popen[bytes], said: str) -> None:
    assert process.stderr is not None
    text = process.stderr.read().decode()
    assert process.wait(20) == 0 and said in text, text


@pytest.mark.usefixtures("planted")
def test_a_worker_that_was_started_by_hand_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And opens the memory of rank 0, without which there is no disk."""
    port = free_port()
    monkeypatch.setenv(TOKEN, "secret")
    worker = start("worker", "--join", f"127.0.0.1:{port}")
    joined = ("parallelism=join", f"parallelism.port={port}")
    stores = ("kv_store=[host,disk]", "kv_store.host.max_bytes=16777216", f"kv_store.disk.path={tmp_path / 'kv'}")
    llm = LLM("bundled", overrides=["device=cpu", "threads=1", "exporter=[]", *COMMON, *joined, *stores])
    assert [rank.place for rank in llm.info.ranks] == [f"pid {os.getpid()}", "at 127.0.0.1"]
    (said,) = llm.generate(["What does json.dumps do?"], max_tokens=8, temperature=0.0, ignore_eos=True)
    assert len(said.tokens) == 8
    left = children(worker.pid)
    llm.close()
    assert_ended(worker, "the engine was shut down")
    assert len(left) == 1 and not os.path.exists(f"/proc/{left[0]}")


@pytest.mark.slow
@pytest.mark.usefixtures("planted")
def test_a_worker_that_was_started_by_hand_serves_and_joins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv(TOKEN, "secret")
    worker = start("worker", "--join", f"127.0.0.1:{port}")
    launcher = ("parallelism=join", f"parallelism.port={port}")
    left = asyncio.run(assert_served(*launcher, pid=worker.pid, again=True))
    assert_ended(worker, "the engine failed; joining it again")
    assert not any(os.path.exists(f"/proc/{pid}") for pid in left)


@pytest.mark.slow
@pytest.mark.usefixtures("planted")
def test_the_same_command_with_another_rank_in_its_environment_is_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    worker = start("serve", "device=cpu", "parallelism=env", *COMMON, RANK="1", **shared)
    for name, value in {**shared, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    left = asyncio.run(assert_served("parallelism=env", pid=worker.pid, again=False))
    assert_ended(worker, "the engine was shut down")
    assert not any(os.path.exists(f"/proc/{pid}") for pid in left)


@few(2)
@pytest.mark.parametrize("greeting", [b"wrong -1\n", b"secret 7\n", b"secret x\n", b"\xff\xff\n", b"x" * 600])
def test_who_does_not_know_the_token_or_has_no_place_is_no_worker(greeting: bytes) -> None:
    listener = Listener("127.0.0.1", 0, "secret")
    strangers = []

    def knock(missing: object) -> None:
        strangers.append(socket.create_connection((listener.host, listener.port)))
        strangers[-1].sendall(greeting)

    with pytest.raises(LauncherError, match=r"no worker came for rank 1 within 1 s at 127.0.0.1:\d+: start it"):
        listener.wait([WorkerJob(1, {})], 1.0, knock, "start it")
    listener.close()
    for stranger in strangers:
        stranger.close()


def test_a_stranger_who_says_little_and_slowly_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "GREETING_S", 0.5)
    listener = Listener("127.0.0.1", 0, "secret")
    stranger, ended, sent = socket.create_connection((listener.host, listener.port)), threading.Event(), []

    def drip() -> None:
        with contextlib.suppress(OSError):
            while not ended.wait(0.1):
                stranger.sendall(b"x")
                sent.append(1)

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        with pytest.raises(LauncherError, match="no worker came"):
            listener.wait([WorkerJob(1, {})], 1.0, lambda missing: None, "start it")
        assert len(sent) < listening.LONGEST_GREETING - 1, "nobody waits for all that may be said"
        assert stranger.recv(1) == b"i", "it is told why"
    finally:
        ended.set()
        dripping.join()
        listener.close()
        stranger.close()


def test_who_waits_for_workers_says_for_which_and_where(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(listening, "SAY_AFTER_S", -1.0)
    listener = Listener("127.0.0.1", 0, "secret")
    with pytest.raises(LauncherError, match="no worker came for rank 1, 3 within 0 s"):
        listener.wait([WorkerJob(1, {}), WorkerJob(3, {})], 0.1, lambda missing: None, "start them")
    listener.close()
    said = f"engine: still waiting for rank 1, 3 at 127.0.0.1:{listener.port}, for another 0 s: start them\n"
    assert capsys.readouterr().err == said


def test_a_worker_says_what_it_waits_for_where_nobody_is_and_where_nobody_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said, has_complained = list[str](), threading.Event()
    monkeypatch.setattr("engine.startup.worker.say", lambda what: (said.append(what), has_complained.set()))
    monkeypatch.setattr("engine.startup.worker.SILENCE_S", 0.01)
    nowhere = f"127.0.0.1:{free_port()}"
    assert join(nowhere, seconds=0.1) is None
    assert said == [f"nobody is at {nowhere} yet ([Errno 111] Connection refused); trying for another 0 s"]
    said.clear()
    has_complained.clear()
    with socket.create_server(("127.0.0.1", 0)) as engine:

        def answer_late() -> None:
            connection, _ = engine.accept()
            has_complained.wait(10)
            connection.sendall(f"{WELCOME}\n".encode())
            connection.close()

        answering = threading.Thread(target=answer_late)
        answering.start()
        there = f"127.0.0.1:{engine.getsockname()[1]}"
        connection = join(there)
        answering.join()
    assert connection is not None and connection.gettimeout() is None
    connection.close()
    (silence,) = said
    assert silence.startswith(f"{there} has said nothing for 0 s: an engine that wants no further worker now")


class Ended(Exception):
    """A worker has."""


def test_a_worker_with_another_secret_is_told_and_ends() -> None:
    listener = Listener("127.0.0.1", 0, "secret")
    worker = start("worker", "--join", f"{listener.host}:{listener.port}", **{TOKEN: "wrong"})

    def waits(missing: object) -> None:
        if worker.poll() is not None:
            raise Ended

    with pytest.raises(Ended):
        listener.wait([WorkerJob(1, {})], BACK_S, waits, "start it")
    listener.close()
    assert worker.stderr is not None
    assert f"turns this worker away: its {TOKEN} is another one" in worker.stderr.read().decode()
    assert worker.returncode == 1


def joined(
    worker_of: Callable[[Listener], subprocess.Popen[bytes]],
) -> tuple[subprocess.Popen[bytes], Link[FromWorker]]:
    """A worker's process, and this end of its connection."""
    listener = Listener("127.0.0.1", 0, "")
    worker = worker_of(listener)
    (started,) = listener.wait([WorkerJob(1, {})], BACK_S, lambda missing: None, "start it")
    listener.close()
    return worker, to_workers(started.connection)


@pytest.mark.usefixtures("planted")
def test_a_worker_joins_the_next_engine_after_one_that_fails() -> None:
    """With a process of its own for each."""
    listener = Listener("127.0.0.1", 0, "")
    process = start("worker", "--join", f"{listener.host}:{listener.port}", **{TOKEN: ""})
    workers = []
    for _ in range(2):
        (started,) = listener.wait([WorkerJob(1, {})], BACK_S, lambda missing: None, "start it")
        link = to_workers(started.connection)
        hello = next_but_beats(link)
        assert isinstance(hello, Hello)
        workers.append(hello.pid)
        link.close()
    assert workers[0] != workers[1]
    process.terminate()
    assert process.stderr is not None
    assert "the engine failed; joining it again" in process.stderr.read().decode() and process.wait(20) == 0
    listener.close()


def next_but_beats(link: Link[FromWorker]) -> FromWorker | None:
    while isinstance(message := link.receive(), Beat):
        pass
    return message


def test_a_worker_that_does_not_go_with_rank_0_is_told_why() -> None:
    worker, link = joined(lambda there: start("worker", "--join", f"{there.host}:{there.port}", **{TOKEN: ""}))
    hello = next_but_beats(link)
    assert isinstance(hello, Hello) and hello.versions == versions(), "the same source in another process"
    link.send(End("rank 1 has other source than rank 0"))
    assert worker.stderr is not None
    said = worker.stderr.read().decode().splitlines()
    assert said[1:] == [said[1]] and said[1].endswith("does not start: rank 1 has other source than rank 0"), said
    assert worker.wait(20) == 1
    link.close()


def test_a_plugin_that_is_kept_in_the_current_folder_is_found_through_pythonpath(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("SCHEDULES = True")
    plan = assemble(["device=cpu", *COMMON])
    mine = replace(plan.choice("scheduler"), factory="mine:Scheduler")
    plan = replace(plan, slots={**plan.slots, "scheduler": (mine,)})
    path = os.pathsep.join((".", os.environ.get("PYTHONPATH", "")))
    worker, link = joined(
        lambda there: start(
            "worker", "--join", f"{there.host}:{there.port}", cwd=tmp_path, PYTHONPATH=path, **{TOKEN: ""}
        )
    )
    assert isinstance(next_but_beats(link), Hello)
    link.send(Assignment(1, plan.to_json(), 1, "127.0.0.1"))
    present = next_but_beats(link)
    assert isinstance(present, Present) and "mine" in present.plugins
    link.send(End())
    worker.communicate(timeout=20)
    link.close()


def test_the_environment_says_which_rank_a_process_is() -> None:
    config = EnvConfig(tp=2, pp=2)
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    slurm = {
        "SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "gpu[03-06,09],login",
        TOKEN: "secret", "CUDA_VISIBLE_DEVICES": "4,5",
    }  # fmt: skip
    expected = {"CUDA_VISIBLE_DEVICES": "1"}
    assert joining(config, torchrun) == Joining("127.0.0.1:29501", 3, expected)
    assert joining(config, slurm) == Joining("gpu03:29600", 2, {"CUDA_VISIBLE_DEVICES": "4"})
    assert joining(config, torchrun | {"RANK": "0"}) is None
    assert joining(EnvConfig(), {}) is None


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"WORLD_SIZE": "2"}, "2 processes were started, and parallelism.tp=4 parallelism.pp=1 makes 4 ranks"),
        ({"RANK": "4"}, "this process is rank 4 of 4, expected one below 4"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT=abc: expected 1 to 65534; or set parallelism.port"),
        ({"RANK": ""}, "the environment has none of RANK, SLURM_PROCID"),
        ({"MASTER_ADDR": ""}, "set parallelism.host"),
        ({"MASTER_ADDR": "10.0.0.1"}, f"set the environment variable {TOKEN} to the same secret"),
    ],
)
def test_an_environment_that_does_not_go_with_the_settings_is_refused(changed: dict[str, str], says: str) -> None:
    fits = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
    with pytest.raises(ValueError, match=says):
        joining(EnvConfig(tp=4), fits | changed)


def joining(config: EnvConfig, environment: dict[str, str]) -> Joining | None:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("SLURM", "MASTER", "CUDA"))]:
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        return config.joins()


def test_a_worker_that_finds_nobody_says_so() -> None:
    plan = assemble(["model.path=bundled", "device=cpu", *COMMON])
    assert plan.layout.size == 2
    done = subprocess.run([*ENGINE, "worker", "--join", "nowhere"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and "--join nowhere: expected HOST:PORT" in done.stderr
