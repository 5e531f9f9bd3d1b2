"""In a process of Ray's on a rank's machine: starts the rank's worker, and knows how it ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence


class RankActor:
    """Its methods run one after another in the process's main thread: the worker ends when that thread does."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def gpus(self) -> list[str]:
        """That Ray reserved for it, as in ``CUDA_VISIBLE_DEVICES``."""
        import ray

        return list(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run this machine's Python. Returns its pid."""
        self._process = subprocess.Popen(
            [sys.executable, *arguments, "--parent", str(os.getpid())],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
        )
        return self._process.pid

    def ended(self) -> str | None:
        """As :meth:`engine.contracts.parallelism.StartedWorker.ended`."""
        code = None if self._process is None else self._process.poll()
        return None if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
