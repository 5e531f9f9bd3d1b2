"""A launcher of engines that are processes of this machine, and connect as if they were elsewhere."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.contracts.config import ParallelismConfig
from engine.contracts.parallelism import (
    TOKEN,
    EngineJob,
    LauncherError,
    StartedEngine,
    StartedWorker,
    WorkerJob,
    WorkerStart,
)
from engine.contracts.provider import BuildContext
from engine_plugins.parallelism.listening import Listener

OTHER_VERSION = """
import sys
from engine.startup import agreement, child
mine = agreement.versions()
agreement.versions = lambda: type(mine)("0.0.1", mine.python, mine.torch, mine.source)
sys.exit(child.main(sys.argv[1:]))
"""
NO_CHECKPOINT = """
import sys
from engine.startup import agreement, child
agreement.checkpoint_hash = lambda path: ""
sys.exit(child.main(sys.argv[1:]))
"""
SCRIPTS = {"other version": OTHER_VERSION, "no checkpoint": NO_CHECKPOINT}


@dataclass(frozen=True)
class FakeConfig(ParallelismConfig):
    seen: str = ""
    """A folder in which a launcher says what it was asked and what it started."""
    wrong: str = ""
    """What goes wrong."""
    memory_bytes: int | None = None
    wait_s: float = 30.0


@dataclass(slots=True)
class Started:
    rank: int
    connection: socket.socket
    place: str
    process: subprocess.Popen[bytes]
    memory_bytes: int | None

    def ended(self) -> str | None:
        code = self.process.poll()
        return None if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"

    def abort(self) -> None:
        self.process.send_signal(signal.SIGABRT)
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()


class FakeLauncher:
    def __init__(self, config: FakeConfig, context: BuildContext) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self, jobs: Sequence[WorkerJob], start: WorkerStart, timeout_s: float) -> Sequence[StartedWorker]:
        raise AssertionError("no ranks")

    def launch_engine(self, job: EngineJob, start: WorkerStart, timeout_s: float) -> StartedEngine:
        wrong, token = self._config.wrong, secrets.token_urlsafe(16)
        if wrong == "refuses":
            raise LauncherError("parallelism.address=nowhere: nothing answers there")
        self._say("job", f"{job.ranks} {job.threads} {job.gpus}")
        listener = Listener("127.0.0.1", 0, token)
        command = ("-P", "-c", SCRIPTS[wrong]) if wrong in SCRIPTS else start.command[1:]
        arguments = ["--join", f"127.0.0.1:{listener.port}", "--rank", "0", "--parent", str(os.getpid())]
        self._process = process = subprocess.Popen(
            [sys.executable, *command, *arguments],
            env={**os.environ, **job.environment, TOKEN: "another" if wrong == "token" else token},
            stdin=subprocess.DEVNULL,
        )
        self._say("pid", str(process.pid))
        self._say("port", str(listener.port))
        try:
            (joined,) = listener.wait([WorkerJob(0, {})], self._config.wait_s, self._waits, "?")
        finally:
            listener.close()
        place = f"pid {process.pid} on 127.0.0.1"
        return Started(0, joined.connection, place, process, self._config.memory_bytes)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _waits(self, missing: Sequence[int]) -> None:
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            raise LauncherError(f"the engine ended with exit code {code} before it connected")

    def _say(self, name: str, text: str) -> None:
        if self._config.seen:
            Path(self._config.seen, name).write_text(text)
