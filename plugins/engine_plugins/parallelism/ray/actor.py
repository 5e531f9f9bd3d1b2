"""In a process of Ray's on the machine of a rank or an engine: starts its process, and knows how that ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence


class RankActor:
    """Its methods run one after another in the process's main thread: what it started ends when that thread does."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def gpus(self) -> list[str]:
        """That Ray reserved for it, as in ``CUDA_VISIBLE_DEVICES``."""
        import ray

        return list(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))

    def node(self) -> str:
        """The id of the node that it is on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

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

    def abort(self) -> None:
        """An engine writes its stacks before it dies of this."""
        if self._process is not None:
            self._process.send_signal(signal.SIGABRT)
            self._process.send_signal(signal.SIGCONT)  # one that is stopped, too

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
