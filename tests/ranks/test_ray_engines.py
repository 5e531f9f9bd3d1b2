"""``fleet.launcher=ray``: engines on two Ray nodes of this machine, behind a server that is not part of Ray."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.contracts.model import DeviceFacts
from engine.contracts.parallelism import EngineJob, WorkerStart
from engine.testing.context import build_context
from engine_plugins.parallelism.ray.config import RayConfig
from engine_plugins.parallelism.ray.launcher import RayLauncher
from tests.needs import needs_ray
from tests.ranks.machines import SAYS_ITS_GPU, Machines
from tests.ranks.processes import Server, children, command_of, is_soon

pytestmark = [pytest.mark.slow, needs_ray]

READY_S = 120.0
ENGINES = ("fleet.replicas=2", "threads=1", "memory.kv_tokens=20000", "model.max_len=512")
PROMPTS = ("import", "json.dumps", "A list is", "def open(", "The standard library", "class", "return", "Raises")


@dataclass(slots=True)
class Answer:
    text: str
    tokens: int
    """That came before it ended."""
    failed: str
    """Empty: it did not."""


def body_of(number: int) -> dict[str, Any]:
    """One of several kinds of requests: short and long, whole and as a stream."""
    return {
        "model": "bundled", "prompt": PROMPTS[number % 8], "max_tokens": 8 + number % 5 * 8, "temperature": 0,
        "ignore_eos": True, "stream": number % 3 != 0,
    }  # fmt: skip


def ask(url: str, number: int) -> Answer:
    body = json.dumps(body_of(number)).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            if not body_of(number)["stream"]:
                answer = json.load(response)
                return Answer(answer["choices"][0]["text"], answer["usage"]["completion_tokens"], "")
            found = Answer("", 0, "no end")
            for line in response:
                data = line.decode().removeprefix("data: ").strip()
                if data == "[DONE]":
                    found.failed = found.failed.removeprefix("no end")
                elif data.startswith("{") and (event := json.loads(data)).get("error"):
                    found.failed = event["error"]["message"]
                elif data.startswith("{") and event["choices"]:
                    found.text += event["choices"][0]["text"]
                    found.tokens += 1
            return found
    except urllib.error.HTTPError as error:  # of a whole answer it is not seen whether it had begun
        return Answer("", 0 if body_of(number)["stream"] else 1, f"{error.code} {error.read().decode()}")


def fleet_of(server: Server) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{server.url}/engine/fleet", timeout=10) as response:
        return list(json.load(response)["engines"])


def both_serve(server: Server) -> bool:
    return all(engine["ready"] for engine in fleet_of(server))


def engines_anywhere() -> list[int]:
    """Engine processes that Ray's actors started, these actors, and what had them started."""
    named = ("RankActor", "engine.startup.child", "engine.startup.launching")
    return [pid for pid in children(os.getpid()) if any(name in command_of(pid) for name in named)]


@contextlib.contextmanager
def served(machines: Machines, log: Path, *overrides: str) -> Iterator[Server]:
    server = Server(log, "fleet.launcher=ray", f"fleet.launch.address={machines.address}", *ENGINES, *overrides)
    try:
        server.wait_until_ready(READY_S)
        assert is_soon(lambda: both_serve(server), READY_S), server.log
        yield server
    finally:
        server.kill()


def is_given_back(machines: Machines) -> bool:
    return is_soon(lambda: not engines_anywhere(), 15.0) and is_soon(
        lambda: machines.free("CPU") == machines.all("CPU"), 20.0
    )


@pytest.mark.usefixtures("planted")
def test_one_of_two_engines_is_killed_under_load_and_no_request_is_lost_that_had_not_begun(
    machines: Machines, tmp_path: Path
) -> None:
    here = Server(tmp_path / "local", *ENGINES[1:])
    try:
        here.wait_until_ready(READY_S)
        expected = {number: ask(here.url, number).text for number in range(120)}  # every kind of them
    finally:
        here.kill()
    with served(machines, tmp_path / "log") as server, ThreadPoolExecutor(24) as clients:
        victim = fleet_of(server)[0]
        nodes = {pid: next(p for p in machines.raylets() if pid in children(p)) for pid in engine_pids(server)}
        assert len(set(nodes.values())) == 2 and victim["host"], "one engine on each machine"
        asked = [clients.submit(ask, server.url, number) for number in range(200)]
        assert is_soon(lambda: sum(one.done() for one in asked) >= 50, 60.0)
        os.kill(victim["pid"], signal.SIGKILL)
        answers = [one.result(120) for one in asked]
        failed = [answer for answer in answers if answer.failed]
        assert all(answer.tokens for answer in failed), [answer for answer in failed if not answer.tokens]
        wrong = [n for n, answer in enumerate(answers) if not answer.failed and answer.text != expected[n % 120]]
        assert wrong == []
        print(f"{len(answers)} requests, {len(failed)} had begun at the engine that was killed")
        assert len(failed) < 30
        assert is_soon(lambda: both_serve(server), READY_S), server.log
        assert [engine["starts"] for engine in fleet_of(server)] == [2, 1]
        died = next(line for line in server.log.splitlines() if "engine died" in line)
        assert f"the engine process (pid {victim['pid']} on {victim['host']}) ended with " in died
        assert server.stop() == 0
    assert is_given_back(machines)


def engine_pids(server: Server) -> list[int]:
    return [engine["pid"] for engine in fleet_of(server)]


def test_engines_are_restarted_one_by_one_and_where_they_run_is_said(machines: Machines, tmp_path: Path) -> None:
    with served(machines, tmp_path / "log") as server:
        before = engine_pids(server)
        urllib.request.urlopen(urllib.request.Request(f"{server.url}/engine/fleet/restart", b"", method="POST"))
        assert is_soon(lambda: [engine["starts"] for engine in fleet_of(server)] == [2, 2], READY_S), server.log
        assert not {*before} & {*engine_pids(server)}
        with urllib.request.urlopen(f"{server.url}/engine/stats?engine=replica-1", timeout=10) as response:
            stats = json.load(response)
        second = fleet_of(server)[1]
        assert (stats["pid"], stats["host"], stats["machine"]) == (second["pid"], second["host"], None)
        assert server.stop() == 0
    assert is_given_back(machines)


def test_a_server_that_is_killed_leaves_nothing_in_the_cluster(machines: Machines, tmp_path: Path) -> None:
    with served(machines, tmp_path / "log") as server:
        os.kill(server.process.pid, signal.SIGKILL)
        assert is_given_back(machines)


def test_an_engine_of_two_ranks_runs_on_one_machine(machines: Machines, tmp_path: Path) -> None:
    with served(machines, tmp_path / "log", "parallelism.tp=2", "fleet.replicas=1") as server:
        (engine,) = fleet_of(server)
        assert any("engine.startup.worker" in command_of(pid) for pid in children(engine["pid"]))
        assert not ask(server.url, 1).failed
        assert server.stop() == 0
    assert is_given_back(machines)


def test_an_engine_on_gpus_sees_those_that_ray_gave_it_and_the_port_is_closed_then(machines: Machines) -> None:
    context = build_context(device=DeviceFacts("cuda"))
    start = WorkerStart((sys.executable, "-c", SAYS_ITS_GPU), lambda connection: None)
    launchers = [RayLauncher(RayConfig(), context) for _ in range(2)]
    try:
        engines = [one.launch_engine(EngineJob(2, 4, 2, {"OMP_NUM_THREADS": "4"}), start, 60.0) for one in launchers]
        assert [engine.connection.recv(100) for engine in engines] == [b"0,1;4"] * 2
        assert [engine.memory_bytes for engine in engines] == [None, None] and machines.free("GPU") == 0
        for engine in engines:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(engine.connection.getsockname())
    finally:
        for one in launchers:
            one.close()
    assert is_soon(lambda: machines.free("GPU") == 4, 10.0)


def test_engines_with_one_port_start_one_after_the_other(machines: Machines, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    with served(machines, tmp_path / "log", f"fleet.launch.port={port}") as server:
        assert server.stop() == 0
    assert is_given_back(machines)


def test_what_no_machine_has_is_refused_with_what_would_fit(machines: Machines, tmp_path: Path) -> None:
    server = Server(tmp_path / "log", "fleet.launcher=ray", f"fleet.launch.address={machines.address}", "threads=3")
    try:
        assert server.process.wait(READY_S) == 2, server.log
        why = "engine: fleet.launcher=ray: an engine needs a Ray node with 3 CPUs; Ray has"
        assert why in server.log and "Use threads=N or fleet.launch.cpus=N" in server.log
    finally:
        server.kill()


def test_an_engine_whose_machine_is_lost_starts_again_on_another(machines: Machines, tmp_path: Path) -> None:
    with served(machines, tmp_path / "log") as server:
        began = time.monotonic()
        machines.lose(machines.second)  # type: ignore[attr-defined]
        assert is_soon(lambda: any(not engine["ready"] for engine in fleet_of(server)), 10.0)
        assert is_soon(lambda: both_serve(server), READY_S), server.log
        print(f"both serve again after {time.monotonic() - began:.1f} s")
        assert not ask(server.url, 1).failed
        assert server.stop() == 0
