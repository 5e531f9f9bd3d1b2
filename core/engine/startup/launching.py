"""Beside the server, for one engine: ``python -m engine.startup.launching --fd FD --parent PID``.

Reads the plan from stdin, has its launcher start the engine, sees that it has the same software and checkpoint, hands
its connection to the server, and ends with it. See :mod:`engine.startup.launched` for what passes between the two.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from typing import TypeVar, cast

import msgspec

from engine.assembly.bind import build_choices, build_context
from engine.assembly.errors import AssemblyError
from engine.assembly.fleet import in_fleet
from engine.assembly.plan import EnginePlan
from engine.assembly.threads import cores_of
from engine.contracts.config import FleetSettings
from engine.contracts.parallelism import EngineJob, EngineLauncher, LauncherError, StartedEngine, WorkerStart
from engine.loop.environment import with_defaults
from engine.loop.messages import Failed, FromEngine, Heartbeat, Progress
from engine.plugin_guard.calls import by_plugin, describe_error
from engine.ranks.link import Link, to_workers
from engine.ranks.messages import Assignment, Begin, End, FromWorker, Hello, Present
from engine.startup.agreement import check_hello, check_present
from engine.startup.fingerprint import versions
from engine.startup.launched import ABORT, MAX_PACKET
from engine.startup.lifetime import end_with
from engine.startup.output import keep_output

START_S = 120.0
"""How long an engine that was started may take to connect."""
HELLO_S = 30.0
"""How long it may take to answer before it has read the plan."""
BEAT_S = 1.0
LAST_S = 1.5
"""How long an engine whose connection ended, or that was told to write its stacks, may take to end."""
POLL_S = 0.05
SERVER = "this server"
M = TypeVar("M")


class Launching:
    """What is said to the server."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._encode = msgspec.msgpack.Encoder().encode
        self._launched = threading.Event()

    def say(self, message: FromEngine) -> None:
        """This process ends where the server is gone."""
        try:
            self._control.send(self._encode(message)[:MAX_PACKET])
        except OSError:
            os._exit(1)

    def beat(self) -> None:
        """Until there is a connection: something goes on."""
        while not self._launched.wait(BEAT_S):
            self.say(Heartbeat())

    def run(self, plan: EnginePlan) -> int:
        assert plan.launcher is not None
        self.say(Progress("launch", 0.0, f"by fleet.launcher={plan.launcher.name}"))
        threading.Thread(target=self.beat, daemon=True).start()
        try:
            launcher = cast(EngineLauncher, build_choices((plan.launcher,), build_context(plan))[0])
        except AssemblyError as error:
            return self._failed(error)
        try:
            engine = launch(launcher, plan)
            self._launched.set()
            socket.send_fds(self._control, [b"connection"], [engine.connection.fileno()])
            engine.connection.close()
            if self._control.recv(len(ABORT)):
                engine.abort()
            self.say(Failed(f"the engine process ({engine.place}) ended with {_end(engine)}"))
            return 0
        except Exception as error:
            return self._failed(error)
        finally:
            launcher.close()

    def _failed(self, error: Exception) -> int:
        if isinstance(error, AssemblyError | LauncherError):
            text = error.text().removeprefix("engine: ") if isinstance(error, AssemblyError) else in_fleet(str(error))
            self.say(Failed(text, refused=True))
        else:
            self.say(Failed(describe_error(error), refused=by_plugin(error), phase="starting"))
        return 1


def launch(launcher: EngineLauncher, plan: EnginePlan) -> StartedEngine:
    """An engine that has the plan, and begins to build. Raises :class:`AssemblyError` for one that differs, and as
    launchers do."""
    ours, threads = versions(), cores_of(plan)
    environment = with_defaults({}, plan.device.kind) | {"OMP_NUM_THREADS": str(threads)}
    engine = launcher.launch_engine(job_of(plan, threads, environment), start(), START_S)
    link, name = to_workers(engine.connection), f"the engine at {engine.place}"
    engine.connection.settimeout(HELLO_S)
    try:
        check_hello(name, _next(link, Hello, name), ours, plan, SERVER)
        plan = alone(plan, engine.memory_bytes)
        link.send(Assignment(0, plan.to_json(), threads, str(engine.connection.getpeername()[0])))
        check_present(name, _next(link, Present, name), plan, SERVER)
    except AssemblyError as error:
        link.send(End(error.text().removeprefix("engine: ")))
        raise
    link.send(Begin())
    engine.connection.settimeout(None)
    return engine


def start() -> WorkerStart:
    def run(connection: socket.socket) -> None:
        raise LauncherError("an engine is a process of its own, no thread")

    return WorkerStart((sys.executable, "-P", "-m", "engine.startup.child"), run)


def job_of(plan: EnginePlan, threads: int, environment: dict[str, str]) -> EngineJob:
    gpus = 0 if plan.device.kind == "cpu" else 1 if plan.parallelism.share_devices else plan.layout.size
    return EngineJob(plan.layout.size, threads, gpus, environment)


def alone(plan: EnginePlan, memory_bytes: int | None) -> EnginePlan:
    """The plan of one engine that has a machine, or ``memory_bytes`` of it, to itself."""
    each = None if memory_bytes is None else memory_bytes // plan.layout.size
    return replace(plan, launcher=None, memory_bytes=each, settings=replace(plan.settings, fleet=FleetSettings()))


def _next(link: Link[FromWorker], kind: type[M], name: str) -> M:
    try:
        message = link.receive()
    except TimeoutError:
        raise LauncherError(f"{name} has said nothing for {HELLO_S:.0f} s") from None
    if not isinstance(message, kind):
        raise LauncherError(f"{name} ended before it began: its words are above, or in the log of its machine")
    return message


def _end(engine: StartedEngine) -> str:
    """How it ended; it is ended where it does not."""
    ends = time.monotonic() + LAST_S
    while (how := engine.ended()) is None and time.monotonic() < ends:
        time.sleep(POLL_S)
    engine.kill()
    return how or "its connection"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="engine.startup.launching")
    parser.add_argument("--fd", type=int)
    parser.add_argument("--parent", type=int)
    given = parser.parse_args(arguments)
    end_with(given.parent)
    keep_output()
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the server drains, then says so
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=given.fd) as control:
        return Launching(control).run(EnginePlan.from_json(sys.stdin.buffer.read()))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what the launcher loaded may have threads that never end
