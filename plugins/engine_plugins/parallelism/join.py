"""Workers are started by hand, on this machine or others: ``engine worker --join HOST:PORT``."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from engine.contracts.config import ParallelismConfig, at_least, between
from engine.contracts.parallelism import SECRET, TOKEN, StartedWorker, WorkerJob, WorkerStart
from engine.contracts.provider import BuildContext
from engine_plugins.parallelism.listening import Listener


@dataclass(frozen=True)
class JoinConfig(ParallelismConfig):
    host: str = "127.0.0.1"
    """An address of this machine that the workers reach."""
    port: int = 29600
    """Where workers join; 0: a free one, which is another one whenever the engine starts again."""
    wait_s: float = 300.0
    """How long workers are waited for."""

    def __post_init__(self) -> None:
        ParallelismConfig.__post_init__(self)
        between("parallelism.port", self.port, 0, 65535)
        at_least("parallelism.wait_s", self.wait_s, 1)


class JoinLauncher:
    """See :class:`engine.contracts.parallelism.Launcher`."""

    def __init__(self, config: JoinConfig, context: BuildContext) -> None:
        self._config = config
        self._listener: Listener | None = None
        self._said = False

    def launch(self, jobs: Sequence[WorkerJob], start: WorkerStart, timeout_s: float) -> Sequence[StartedWorker]:
        token = os.environ.get(TOKEN) or os.environ.get(SECRET) or secrets.token_urlsafe(16)
        self._listener = Listener(self._config.host, self._config.port, token)
        command = f"{TOKEN}={token} engine worker --join {self._listener.host}:{self._listener.port}"

        def waits(missing: Sequence[int]) -> None:
            if not self._said:
                self._said = True
                ranks = ", ".join(map(str, missing))
                # In one piece, on lines of its own: others write there, too.
                sys.stderr.write(f"\nwaiting for rank {ranks}: run this once for each:\n  {command}\n\n")
                sys.stderr.flush()

        return self._listener.wait(jobs, self._config.wait_s, waits, "run `engine worker --join` once for each")

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
