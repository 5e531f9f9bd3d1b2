"""The engine process: ``python -m engine.startup.child --fd FD --parent PID``. Ends when its parent does.
``--segments FD,FD --segment NUMBER`` name memory that outlives it (:class:`engine.startup.segments.Segments`).

On another machine than its server's it is started with ``--join HOST:PORT`` instead of ``--fd``: it connects, and says
first what is installed there. It ends when its connection does, too.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

import msgspec

from engine.assembly.bind import describe_model
from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan
from engine.checkpoint.files import CheckpointError
from engine.loop.inbox import Inbox
from engine.loop.messages import (
    MAX_FRAME,
    DeviceFailed,
    Failed,
    FromEngine,
    Heartbeat,
    Phase,
    Ping,
    Progress,
    Ready,
    ToEngine,
)
from engine.plugin_guard.calls import by_plugin, describe_error
from engine.startup.engine_process import HEADER
from engine.startup.kernels import PHASE, begin_kernels
from engine.startup.lifetime import end_with
from engine.startup.output import keep_output
from engine.startup.segments import Segments
from engine.step.plan import RankFailed

IMPORTS = "import torch"
"""The first phase of start-up: a process that has not loaded torch yet spends seconds there."""


class Connection:
    """Blocking frames over the socket to the API process. Any thread may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._stream = self._socket.makefile("rb")
        self._encode = msgspec.msgpack.Encoder().encode
        self._sending = threading.Lock()

    def receive(self) -> bytes | None:
        """The next frame; ``None`` when the peer is gone."""
        header = self._stream.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        (size,) = HEADER.unpack(header)
        if size > MAX_FRAME:
            raise ValueError(f"a frame of {size} bytes, at most {MAX_FRAME} are allowed")
        body = self._stream.read(size)
        return body if len(body) == size else None

    def send(self, message: FromEngine) -> None:
        """Raises ``BrokenPipeError`` when the peer is gone."""
        with self._sending:
            body = self._encode(message)
            try:
                self._socket.sendall(HEADER.pack(len(body)) + body)
            except (ConnectionError, TimeoutError) as error:
                raise BrokenPipeError(str(error)) from error


class Beats:
    """Where heartbeats come from: nothing is known of steps until there is an engine."""

    def __init__(self) -> None:
        self.of: Callable[[], Heartbeat] = Heartbeat


def main(arguments: list[str]) -> int:
    """Receive the plan, build the engine, run it."""
    parser = argparse.ArgumentParser(prog="engine.startup.child")
    parser.add_argument("--fd", type=int)
    parser.add_argument("--join")
    parser.add_argument("--rank", type=int)  # as launchers say it to workers: 0
    parser.add_argument("--parent", type=int)
    parser.add_argument("--segments")
    parser.add_argument("--segment", type=int)
    given = parser.parse_args(arguments)
    end_with(given.parent)
    keep_output()
    faulthandler.enable()  # who kills a process that hangs sends SIGABRT first, and its stacks are seen
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the parent drains, then says so
        signal.signal(number, signal.SIG_IGN)
    if given.join is None:
        connection = Connection(socket.socket(fileno=given.fd))
        plan_json = connection.receive()
        segments = Segments.of(given.segments, given.segment)
        return 1 if plan_json is None else run(connection, lambda: EnginePlan.from_json(plan_json), segments=segments)
    from engine.startup.joined import end_soon, join_server

    joined = join_server(given.join)
    return 1 if joined is None else run(Connection(joined.connection), joined.plan, joined.host, end_soon)


def _do_nothing() -> None: ...


def run(
    connection: Connection,
    plan_of: Callable[[], EnginePlan],
    host: str = "",
    ended: Callable[[], None] = _do_nothing,
    segments: Segments | None = None,
) -> int:
    """``host``: see :attr:`engine.loop.messages.EngineInfo.host`; ``ended``: called when the connection ends;
    ``segments``: memory that outlives this process."""
    inbox = Inbox()
    beats = Beats()
    try:
        plan = plan_of()
        threading.Thread(target=_listen, args=(connection, inbox, beats, ended), name="inbox", daemon=True).start()
        described = describe_model(plan)
        compiling = begin_kernels(plan, described.graph)
        if compiling:
            connection.send(Progress(PHASE, 0.0, compiling))
        connection.send(Progress(IMPORTS, 0.0))
        started = time.monotonic()
        from engine.loop.driver import drive
        from engine.startup.build import build_engine

        imported = Phase(IMPORTS, round(time.monotonic() - started, 3))
        engine = build_engine(
            plan,
            connection.send,
            on_failure=lambda why: inbox.put(DeviceFailed(why)),
            described=described,
            segments=segments,
        )
        beats.of, inbox.compile = engine.core.heartbeat, engine.grammars.prepare
        phases = (imported, *engine.info.phases)
        connection.send(Ready(msgspec.structs.replace(engine.info, phases=phases, host=host)))
        return 0 if drive(engine.core, inbox, connection.send, engine.expert_load) else 1
    except BrokenPipeError:
        return 1
    except Exception as error:
        connection.send(failure(error))
        return 1


def failure(error: Exception) -> Failed:
    """What to tell the API process of an engine that cannot start. The place in the code is logged of what nobody
    foresaw, plugins that raise or break their contract among it."""
    if isinstance(error, AssemblyError):
        return Failed(error.text().removeprefix("engine: "), refused=True)
    if isinstance(error, CheckpointError):
        return Failed(str(error), refused=True)
    if isinstance(error, RankFailed):  # which has logged its own error
        return Failed(str(error), phase="starting", cause="rank_failed")
    traceback.print_exception(error)
    return Failed(describe_error(error), refused=by_plugin(error), phase="starting")


def _listen(connection: Connection, inbox: Inbox, beats: Beats, ended: Callable[[], None] = _do_nothing) -> None:
    """Decode what the API process sends; ``None`` when it is gone or not making sense, and ``ended`` is called. Pings
    are answered here, while the engine builds and steps."""
    decode = msgspec.msgpack.Decoder(ToEngine).decode
    try:
        while (body := connection.receive()) is not None:
            message = decode(body)
            if isinstance(message, Ping):
                connection.send(beats.of())
            else:
                inbox.put(message)
    except ConnectionError:
        pass  # the API process is gone, or closed the connection while a heartbeat was on its way
    except (ValueError, OSError):
        traceback.print_exc()
    inbox.put(None)
    ended()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread may still be in a call that waits for a rank which is gone
