"""A server in processes of its own, whose ranks may be anywhere, as somebody sees it who has its URL."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

QUESTION = [{"role": "user", "content": "What does json.dumps do?"}]
ANSWER = "Serialize ``obj`` to a JSON formatted ``str``."
"""Of the bundled model, greedily."""


def children(pid: int) -> list[int]:
    """Of a process, and theirs."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        own = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return []
    return own + [grandchild for child in own for grandchild in children(child)]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def pss_mib(pids: list[int]) -> float:
    """Memory of processes, what several share counted once."""
    found = 0
    for pid in pids:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        found += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return found / 1024


def is_soon(claim: Callable[[], object], seconds: float) -> bool:
    ends = time.monotonic() + seconds
    while not claim() and time.monotonic() < ends:
        time.sleep(0.1)  # polling other processes, bounded
    return bool(claim())


class Server:
    """``engine serve`` with the bundled model."""

    def __init__(self, log: Path, *overrides: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        self._log = log
        arguments = ["serve", "model.path=bundled", "device=cpu", f"server.port={self.url.rpartition(':')[2]}"]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "engine.cli.main", *arguments, *overrides],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._threads = ThreadPoolExecutor(16)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_until_ready(self, seconds: float) -> float:
        """Returns how long it took."""
        began = time.monotonic()
        while True:
            assert self.process.poll() is None, self.log
            try:
                with urllib.request.urlopen(f"{self.url}/ready", timeout=5):
                    return time.monotonic() - began
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                assert time.monotonic() - began < seconds, self.log
                time.sleep(0.1)  # polling another process, bounded

    def answer(self) -> str:
        body = {"messages": QUESTION, "temperature": 0, "max_tokens": 60}
        with self._post("/v1/chat/completions", body) as response:
            return str(json.load(response)["choices"][0]["message"]["content"])

    def stream(self, num_tokens: int) -> Future[list[str]]:
        """The events of a stream that begins now."""
        return self._threads.submit(lambda: list(self._events(num_tokens)))

    def stop(self) -> int:
        """As a service manager does. Returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        finally:
            self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._threads.shutdown()

    def _events(self, num_tokens: int) -> Iterator[str]:
        body = {"prompt": "import", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        with self._post("/v1/completions", body) as response:
            for line in response:
                if line.startswith(b"data: "):
                    yield line[6:].decode().strip()

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        encoded = json.dumps({"model": "bundled", **body}).encode()
        request = urllib.request.Request(self.url + path, encoded, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=120)
