"""Slot ``parallelism``: how are the workers of further ranks started and found?

The core decides who holds what (:mod:`engine.models.placement`), plans every step, and tells workers what to run. A
launcher starts processes that run ``engine.startup.worker`` and hands over a connection to each. Tensors and plans
never pass through it.

A launcher may also start whole engines (:class:`EngineLauncher`): ``fleet.launcher`` names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from socket import socket

TOKEN = "ENGINE_JOIN_TOKEN"
"""The environment variable with what a worker that connects says first: a line of this and its rank (-1: any)."""
WELCOME = "welcome"
"""The line that it hears then; any other one says why it is not wanted."""
SECRET = "ENGINE_SECRET"
"""The environment variable of an engine process with what a launcher may use as that token: a server starts all its
engines with the same, so workers that were started by hand find the next one, too."""


ENGINES = "engines"
"""Capability of a launcher that is an :class:`EngineLauncher`."""
ENGINES_HERE = "engines_here"
"""Capability of a launcher for which the server starts engines by itself, as its own children."""


class LauncherError(RuntimeError):
    """Workers that could not be started, or did not come: what is missing, and what to do."""


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """One worker to start."""

    rank: int
    """From 1 on: rank 0 is the engine process itself."""
    environment: Mapping[str, str]
    """Variables to set beside those that are inherited: which GPU it sees, for example."""


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """How a worker is started."""

    command: tuple[str, ...]
    """Runs a worker in a process of its own. After it comes where it finds the engine process: ``--fd N --parent
    PID`` for a socket that it inherits, or ``--join HOST:PORT`` for one that it connects to; there, the environment
    variable ``ENGINE_JOIN_TOKEN`` holds the token that it says first, and waits for a line: :data:`WELCOME`."""
    run: Callable[[socket], None]
    """Runs a worker in the thread that calls it, to its end. Called with its end of the connection."""


@runtime_checkable
class StartedWorker(Protocol):
    """A worker that was started."""

    rank: int
    connection: socket
    """To the worker. The core owns it from now on."""
    place: str
    """Where it runs, for messages: ``pid 4711``, ``pid 4711 on 10.0.0.2``."""

    def ended(self) -> str | None:
        """How it ended (``signal 9``, ``exit code 1``), as far as that can be known; ``None`` while it runs."""
        ...

    def kill(self) -> None:
        """End it at once. One that has ended is left alone."""
        ...


@runtime_checkable
class Launcher(Protocol):
    """The plugin."""

    def launch(self, jobs: Sequence[WorkerJob], start: WorkerStart, timeout_s: float) -> Sequence[StartedWorker]:
        """Start every job and wait until all are connected. Raises :class:`LauncherError` after ``timeout_s``, or as
        soon as it is clear that one will not come; whatever was started is ended then."""
        ...

    def close(self) -> None:
        """End what was started and is still there, and give everything back."""
        ...


@dataclass(frozen=True, slots=True)
class EngineJob:
    """One engine to start, somewhere."""

    ranks: int
    """Processes that compute."""
    threads: int
    """CPU threads of each."""
    gpus: int
    """That all of them need together; 0: they compute on the CPU."""
    environment: Mapping[str, str]
    """Variables to set beside those that are inherited, and those that say which GPUs it sees."""


@runtime_checkable
class StartedEngine(StartedWorker, Protocol):
    """The process of an engine that was started. Its ``rank`` is 0."""

    memory_bytes: int | None
    """Bytes of memory that are the engine's share of its machine; ``None``: what it finds free there."""

    def abort(self) -> None:
        """Have it write its stacks to stderr and end, as far as that can be done. Returns at once."""
        ...


@runtime_checkable
class EngineLauncher(Protocol):
    """What a launcher may do besides. It is asked in a process of its own for each engine, which ends with the engine:
    what it started must end with that process, too, however it ends."""

    def launch_engine(self, job: EngineJob, start: WorkerStart, timeout_s: float) -> StartedEngine:
        """Start an engine on a machine that has what it needs, and wait until it is connected. The command of ``start``
        takes ``--join HOST:PORT`` as a worker's does. Raises as :meth:`Launcher.launch`."""
        ...

    def close(self) -> None:
        """As :meth:`Launcher.close`."""
        ...
