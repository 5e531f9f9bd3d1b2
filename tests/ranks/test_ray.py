"""``parallelism=ray``, over two Ray nodes on this machine: each is a machine as far as Ray and the engine can tell."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.contracts.model import DeviceFacts
from engine.contracts.parallelism import LauncherError, WorkerJob, WorkerStart
from engine.testing.context import build_context
from engine_plugins.parallelism.ray.config import RayConfig
from engine_plugins.parallelism.ray.launcher import RayLauncher
from tests.needs import needs_ray
from tests.ranks.machines import SAYS_ITS_GPU, Machines
from tests.ranks.processes import ANSWER, Server, children, command_of, is_soon, pss_mib

pytestmark = [pytest.mark.slow, needs_ray]

TIMEOUT_S = 10.0
"""``parallelism.timeout_s``"""
READY_S = 120.0


@contextlib.contextmanager
def served(machines: Machines, log: Path, *overrides: str) -> Iterator[Server]:
    server = Server(
        log, "parallelism=ray", f"parallelism.address={machines.address}", "communicator=auto",
        f"parallelism.timeout_s={TIMEOUT_S}", "threads=1", *overrides,
    )  # fmt: skip
    try:
        yield server
    finally:
        server.kill()


def ranks_anywhere(machines: Machines) -> list[int]:
    """Processes of ranks that Ray's actors started, and these actors."""
    return [pid for pid in machines.own() if "RankActor" in (found := command_of(pid)) or "engine.startup" in found]


@contextlib.contextmanager
def launched(config: RayConfig, kind: str, script: str = SAYS_ITS_GPU) -> Iterator[list[Any]]:
    launcher = RayLauncher(config, build_context(device=DeviceFacts(kind, count=2)))
    jobs = [WorkerJob(rank, {"OMP_NUM_THREADS": "1"}) for rank in range(1, config.tp * config.pp)]
    try:
        yield list(launcher.launch(jobs, WorkerStart((sys.executable, "-c", script), lambda connection: None), 60.0))
    finally:
        launcher.close()


def test_ranks_of_a_node_are_together_and_the_first_are_this_ones(machines: Machines) -> None:
    with launched(RayConfig(tp=4, nodes=2), "cpu") as workers:
        assert [worker.connection.recv(100) for worker in workers] == [b";1"] * 3
        first, second, third = (worker.actor.node.id for worker in workers)
        assert (first, second) == (machines.here, third) and third != machines.here
        workers[0].kill()
        assert is_soon(lambda: workers[0].ended() is not None, 10.0)
        assert workers[1].ended() is None


def test_every_rank_sees_one_gpu_which_no_other_rank_of_its_machine_has(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    for own in ("0", "1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
        with launched(RayConfig(tp=4, nodes=2), "cuda") as workers:
            gpus = [worker.connection.recv(100).decode().partition(";")[0] for worker in workers]
            assert gpus[0] == str(1 - int(own)) and sorted(gpus[1:]) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(LauncherError, match="this process runs on GPU 5"), launched(RayConfig(tp=2), "cuda"):
        pass
    assert is_soon(lambda: machines.free("GPU") == 4, 10.0)


def test_a_worker_that_ends_before_it_connects_is_not_waited_for(machines: Machines) -> None:
    with (
        pytest.raises(LauncherError, match=r"rank 1 \(pid \d+ on .*\) ended with exit code 7 before it connected"),
        launched(RayConfig(tp=2, nodes=2), "cpu", "raise SystemExit(7)"),
    ):
        pass


def test_machines_that_others_use_are_waited_for_so_long(machines: Machines) -> None:
    with (
        launched(RayConfig(tp=2, nodes=2, cpus=2), "cpu"),
        pytest.raises(LauncherError, match="Ray did not have 2 machines with 1 CPU free each, this one among"),
        launched(RayConfig(tp=2, nodes=2, wait_s=2.0), "cpu"),
    ):
        pass


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_two_nodes_serve_the_answers_of_one(machines: Machines, axis: str, tmp_path: Path) -> None:
    before = pss_mib(machines.own())
    with served(machines, tmp_path / "log", f"parallelism.{axis}=2", "parallelism.nodes=2") as server:
        seconds = server.wait_until_ready(READY_S)
        assert server.answer().startswith(ANSWER)
        assert machines.free("CPU") == machines.all("CPU") - 2  # a bundle for each rank, rank 0 too
        engine = children(server.process.pid)
        ranks = ranks_anywhere(machines)
        print(
            f"{axis}=2: ready after {seconds:.1f} s; server {pss_mib([server.process.pid, *engine]):.0f} MiB, rank 1 "
            f"and its actor {pss_mib(ranks):.0f} MiB, Ray's others {before:.0f} MiB"
        )
        assert len(ranks) == 2  # one actor, and its child
        assert server.stop() == 0
    assert is_soon(lambda: not ranks_anywhere(machines), 10.0)
    assert is_soon(lambda: machines.free("CPU") == machines.all("CPU"), 10.0)


def test_an_engine_that_is_killed_leaves_nothing_in_the_cluster(machines: Machines, tmp_path: Path) -> None:
    with served(machines, tmp_path / "log", "parallelism.tp=2", "parallelism.nodes=2") as server:
        server.wait_until_ready(READY_S)
        for pid in (server.process.pid, *children(server.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert is_soon(lambda: not ranks_anywhere(machines), 10.0)
    assert is_soon(lambda: machines.free("CPU") == machines.all("CPU"), 20.0)


@pytest.mark.parametrize("overrides, why", [
    (["parallelism.tp=2", "parallelism.nodes=2", "parallelism.cpus=3"], "Use parallelism.cpus=2, or start Ray on more"),
    (["parallelism.pp=4", "parallelism.nodes=4"], "Use parallelism.nodes=2, or start Ray on more machines with"),
])  # fmt: skip
def test_what_the_cluster_does_not_have_is_refused_with_what_would_fit(
    machines: Machines, overrides: list[str], why: str, tmp_path: Path
) -> None:
    with served(machines, tmp_path / "log", *overrides) as server:
        assert server.process.wait(READY_S) == 2, server.log
        assert why in server.log and "Traceback" not in server.log
        print(server.log.splitlines()[-1])


def test_a_lost_node_ends_streams_in_errors_and_a_new_one_brings_the_service_back(
    machines: Machines, tmp_path: Path
) -> None:
    with served(machines, tmp_path / "log", "parallelism.tp=2", "parallelism.nodes=2") as server:
        server.wait_until_ready(READY_S)
        streams = [server.stream(2000) for _ in range(6)]
        time.sleep(1.0)  # they run; whenever the node is lost, the claim is the same
        assert not any(stream.done() for stream in streams)
        (rank,) = machines.lose(machines.second)  # type: ignore[attr-defined]
        began = time.monotonic()
        ended = [stream.result(TIMEOUT_S) for stream in streams]
        seconds = time.monotonic() - began
        assert all('"error"' in events[-1] or '"error"' in events[-2] for events in ended), [e[-2:] for e in ended]
        machines.second = machines.add()  # type: ignore[attr-defined]
        assert is_soon(lambda: "engine restarted" in server.log, 120.0), server.log
        back_s = time.monotonic() - began
        server.wait_until_ready(10.0)
        assert server.answer().startswith(ANSWER)
        cause = next(line for line in server.log.splitlines() if "engine died" in line)
        print(f"streams ended after {seconds:.2f} s, service back after {back_s:.1f} s: {cause}")
        assert f"rank 1 (pid {rank} on" in cause
        assert server.stop() == 0
    assert is_soon(lambda: not ranks_anywhere(machines), 10.0)
    assert is_soon(lambda: machines.free("CPU") == machines.all("CPU"), 20.0)


def test_without_a_cluster_what_to_run_is_said(tmp_path: Path) -> None:
    server = Server(tmp_path / "log", "parallelism=ray", "parallelism.address=127.0.0.1:1", "parallelism.tp=2",
                    "parallelism.nodes=2", "communicator=auto")  # fmt: skip
    try:
        assert server.process.wait(READY_S) == 2
        assert "parallelism.address=127.0.0.1:1: nothing answers there" in server.log
    finally:
        server.kill()
