"""Asks ``GET /health`` every few milliseconds from a process of its own, and says how long each answer took.

``with Probe(target) as probe: ...`` fills ``probe.ms``. The longest is the longest time the server's event loop was
blocked, plus what this machine takes by itself: :func:`quiet` measures that.
"""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import time

from tools.attack.client import ROOT, Address

EVERY_S = 0.005
REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Probe:
    """A context manager; ``ms`` holds the latencies once it is left."""

    def __init__(self, target: Address, every_s: float = EVERY_S) -> None:
        self._arguments = [target.host, str(target.port), str(every_s)]
        self.ms: list[float] = []

    def __enter__(self) -> Probe:
        command = [sys.executable, "-m", "tools.attack.probe", *self._arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it has its first answer
        return self

    def __exit__(self, *_: object) -> None:
        self.ms = json.loads(self._process.communicate()[0])

    @property
    def worst(self) -> float:
        return max(self.ms)


def quiet(target: Address, seconds: float) -> Probe:
    """The same with nothing else going on."""
    with Probe(target) as probe:
        time.sleep(seconds)
    return probe


def main(host: str, port: str, every_s: str) -> None:
    """Probe until stdin ends; the latencies go to stdout as JSON."""
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    latencies = [_ask(connection)]
    print(flush=True)
    while not select.select([sys.stdin], [], [], float(every_s))[0]:
        latencies.append(_ask(connection))
    print(json.dumps(latencies))


def _ask(connection: socket.socket) -> float:
    begun = time.perf_counter()
    connection.sendall(REQUEST)
    data = b""
    while not data.endswith(b"}"):  # of the JSON body
        part = connection.recv(65536)
        if not part:
            raise SystemExit("error: the server closed the probe's connection")
        data += part
    return (time.perf_counter() - begun) * 1e3


if __name__ == "__main__":
    main(*sys.argv[1:])
