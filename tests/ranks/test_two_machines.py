"""``parallelism=join`` over two machines: a network namespace on this one, behind a cable of its own, is another one
as far as sockets can tell."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.needs import needs_network_namespaces
from tests.ranks.processes import ANSWER, Server, is_soon

pytestmark = [needs_network_namespaces, pytest.mark.slow]

READY_S = 120.0
TIMEOUT_S = 5.0
"""``parallelism.timeout_s``"""
COMMAND = re.compile(r"(ENGINE_JOIN_TOKEN)=(\S+) engine (worker --join \S+)")
"""As the server prints it."""


class Cable:
    """Between this machine and the other one, which is a network namespace."""

    here = "10.201.77.1"

    def __init__(self) -> None:
        number = os.getpid() % 10000
        self.namespace, end, self._other = f"engine-{number}", f"engine{number}a", f"engine{number}b"
        self._ip("netns", "add", self.namespace)
        self._ip("link", "add", end, "type", "veth", "peer", "name", self._other, "netns", self.namespace)
        self._ip("addr", "add", f"{self.here}/30", "dev", end)
        self._there("addr", "add", "10.201.77.2/30", "dev", self._other)
        self._there("link", "set", "lo", "up")
        self._ip("link", "set", end, "up")
        self.plug()

    def plug(self) -> None:
        self._there("link", "set", self._other, "up")

    def pull(self) -> None:
        """At the other machine's end: without an interface of its own, this one would send elsewhere."""
        self._there("link", "set", self._other, "down")

    def remove(self) -> None:
        self._ip("netns", "del", self.namespace)

    def _there(self, *arguments: str) -> None:
        self._ip("-n", self.namespace, *arguments)

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)


@pytest.fixture
def cable() -> Iterator[Cable]:
    found = Cable()
    yield found
    found.remove()


@contextlib.contextmanager
def worker(cable: Cable, command: re.Match[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """On the other machine: the command that the server prints."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["ip", "netns", "exec", cable.namespace, sys.executable, "-m", "engine.cli.main", *command[3].split()],
            env={**os.environ, command[1]: command[2]}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def waited_for(server: Server) -> re.Match[str]:
    ends = time.monotonic() + READY_S
    while (found := COMMAND.search(server.log)) is None:
        assert server.process.poll() is None and time.monotonic() < ends, server.log
        time.sleep(0.1)  # polling another process, bounded
    return found


def test_a_pulled_cable_ends_streams_in_errors_and_the_worker_joins_again(cable: Cable, tmp_path: Path) -> None:
    server = Server(
        tmp_path / "server", "parallelism=join", f"parallelism.host={cable.here}",
        "parallelism.tp=2", "parallelism.nodes=2", f"parallelism.timeout_s={TIMEOUT_S}", "threads=1",
    )  # fmt: skip
    try:
        with worker(cable, waited_for(server), tmp_path / "worker") as joined:
            server.wait_until_ready(READY_S)
            assert server.answer().startswith(ANSWER)
            streams = [server.stream(2000) for _ in range(4)]
            time.sleep(1.0)  # they run; whenever the cable is pulled, the claim is the same
            assert not any(stream.done() for stream in streams)
            cable.pull()
            ended = [stream.result(TIMEOUT_S + 1.0) for stream in streams]
            assert all('"error"' in events[-1] or '"error"' in events[-2] for events in ended), [e[-2:] for e in ended]
            assert is_soon(lambda: "engine died" in server.log, 5.0), server.log
            cause = next(line for line in server.log.splitlines() if "engine died" in line)
            # Nothing came from there: no end of a connection, no error.
            assert "rank 1 (at 10.201.77.2)" in cause, cause
            cable.plug()
            server.wait_until_ready(READY_S)
            assert server.answer().startswith(ANSWER)
            assert server.stop() == 0
            assert joined.wait(10.0) == 0
    finally:
        server.kill()
