"""``parallelism=ray``, over two Ray nodes on this machine: each is a machine as far as Ray and the engine can tell."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs_ray
from tests.ranks.processes import ANSWER, Server, children, command_of, pss_mib

pytestmark = [pytest.mark.slow, needs_ray]

TIMEOUT_S = 10.0
"""``parallelism.timeout_s``"""
READY_S = 120.0


class Machines:
    """A Ray cluster of nodes with two CPUs each, the first of which is where engines are started."""

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._ray = ray
        # An address of its own: with 127.0.0.1 Ray's nodes do not find each other.
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        self.address: str = self._cluster.address
        ray.init(address=self.address, namespace="tests", log_to_driver=False, logging_level="ERROR")

    def add(self) -> Any:
        return self._cluster.add_node(num_cpus=2)

    def raylet(self, node: Any) -> int:
        return int(node.all_processes["raylet"][0].process.pid)

    def lose(self, node: Any) -> list[int]:
        """Every process of a node is gone at once, as when its power is cut. Returns those of ranks."""
        raylet = self.raylet(node)
        gone = [raylet, *children(raylet)]
        ranks = [pid for pid in gone if "engine.startup.worker" in command_of(pid)]
        for pid in gone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return ranks

    def own(self) -> list[int]:
        """Ray's processes: those that this process started, and theirs."""
        engines = [pid for pid in children(os.getpid()) if "engine.cli.main" in command_of(pid)]
        theirs = {child for pid in engines for child in (pid, *children(pid))}
        return [pid for pid in children(os.getpid()) if pid not in theirs]

    def free_cpus(self) -> float:
        return float(self._ray.available_resources().get("CPU", 0))

    def all_cpus(self) -> float:
        return float(self._ray.cluster_resources().get("CPU", 0))

    def close(self) -> None:
        self._ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        began = time.monotonic()
        found = Machines()
        found.second = found.add()  # type: ignore[attr-defined]
        print(f"two Ray nodes: {time.monotonic() - began:.1f} s, {pss_mib(found.own()):.0f} MiB")
        yield found
        found.close()


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


def is_soon(claim: Any, seconds: float) -> bool:
    ends = time.monotonic() + seconds
    while not claim() and time.monotonic() < ends:
        time.sleep(0.1)  # polling other processes, bounded
    return bool(claim())


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_two_nodes_serve_the_answers_of_one(machines: Machines, axis: str, tmp_path: Path) -> None:
    before = pss_mib(machines.own())
    with served(machines, tmp_path / "log", f"parallelism.{axis}=2", "parallelism.nodes=2") as server:
        seconds = server.wait_until_ready(READY_S)
        assert server.answer().startswith(ANSWER)
        assert machines.free_cpus() == machines.all_cpus() - 2  # a bundle for each rank, rank 0 too
        engine = children(server.process.pid)
        ranks = ranks_anywhere(machines)
        print(
            f"{axis}=2: ready after {seconds:.1f} s; server {pss_mib([server.process.pid, *engine]):.0f} MiB, rank 1 and "
            f"its actor {pss_mib(ranks):.0f} MiB, Ray's others {before:.0f} MiB"
        )
        assert len(ranks) == 2  # one actor, and its child
        assert server.stop() == 0
    assert is_soon(lambda: not ranks_anywhere(machines), 10.0)
    assert is_soon(lambda: machines.free_cpus() == machines.all_cpus(), 10.0)


def test_an_engine_that_is_killed_leaves_nothing_in_the_cluster(machines: Machines, tmp_path: Path) -> None:
    with served(machines, tmp_path / "log", "parallelism.tp=2", "parallelism.nodes=2") as server:
        server.wait_until_ready(READY_S)
        for pid in (server.process.pid, *children(server.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert is_soon(lambda: not ranks_anywhere(machines), 10.0)
    assert is_soon(lambda: machines.free_cpus() == machines.all_cpus(), 20.0)


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
    assert is_soon(lambda: machines.free_cpus() == machines.all_cpus(), 20.0)


def test_without_a_cluster_what_to_run_is_said(tmp_path: Path) -> None:
    server = Server(tmp_path / "log", "parallelism=ray", "parallelism.address=127.0.0.1:1", "parallelism.tp=2",
                    "parallelism.nodes=2", "communicator=auto")  # fmt: skip
    try:
        assert server.process.wait(READY_S) == 2
        assert "parallelism.address=127.0.0.1:1: nothing answers there" in server.log
    finally:
        server.kill()
