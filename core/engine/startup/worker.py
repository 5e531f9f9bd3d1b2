"""The process of a further rank: ``python -m engine.startup.worker``, started by a launcher.

It says what it is, is told which rank of which plan it is, loads that rank's share, and executes the plans that come.
It decides nothing, and ends when the engine process does.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from engine.assembly.bind import describe_model
from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan
from engine.checkpoint.files import CheckpointError
from engine.contracts.parallelism import TOKEN, WELCOME
from engine.plugin_guard.calls import by_plugin, describe_error
from engine.ranks.blame import log_own, waited
from engine.ranks.link import Link, to_driver
from engine.ranks.messages import (
    BEAT_S,
    Allocate,
    Assignment,
    Beat,
    Begin,
    Bound,
    Broken,
    Built,
    End,
    KeepRecords,
    Loaded,
    Meet,
    Opened,
    OpenMemory,
    Result,
    Run,
    Store,
    Stored,
    ToWorker,
    Where,
)
from engine.startup.agreement import hello, present
from engine.startup.kernels import begin_kernels
from engine.startup.lifetime import end_with
from engine.startup.output import keep_output
from engine.startup.segments import opened
from engine.step.plan import StepResult

if TYPE_CHECKING:
    from engine.contracts.communicator import Communicator

JOIN_S = 60.0
"""How long an engine process is looked for."""
SILENCE_S = 5.0
"""How long an engine process that waits for workers may take to answer one."""
UNREACHED_S = 30.0
"""How long the engine process's machine may leave beats unconfirmed: it is gone, and no end of the connection came."""
NOBODY_THERE = 3
"""Exit code: no engine process was found."""
TURNED_AWAY = 4
"""Exit code: one was found that does not want this worker."""
LAST_S = 2.0
"""How long a worker whose engine process is gone may take to give everything back."""


M = TypeVar("M")


class TurnedAway(Exception):
    """The engine process does not want this worker: why."""


class Gone(Exception):
    """The engine process is gone, or (``code`` 0) has no more use for this worker, or (``why``) cannot use it."""

    def __init__(self, code: int, why: str = "") -> None:
        super().__init__(why)
        self.code = code
        self.why = why


class Worker:
    """One rank, behind its connection to the engine process."""

    def __init__(self, link: Link[ToWorker], exits: bool) -> None:
        """``exits``: a process of its own, which ends with the connection even in the middle of a call."""
        self._link = link
        self._exits = exits
        self._code = 0
        self._inbox: queue.SimpleQueue[ToWorker | None] = queue.SimpleQueue()
        self._where: Callable[[], Where] = Where
        self._ended = threading.Event()
        self._memory = -1
        """The memory of rank 0, once it is open."""
        self.communicator: Communicator | None = None
        self.why = ""
        """The engine process cannot use this worker."""

    def run(self) -> int:
        """Returns an exit code."""
        threading.Thread(target=self._listen, name="inbox", daemon=True).start()
        threading.Thread(target=self._beat, name="beats", daemon=True).start()
        try:
            self._work()
        except Gone as gone:
            self._code, self.why = max(self._code, gone.code), gone.why
        except Exception as error:
            if not self._ended.is_set():
                self._say_why(error)
                self._code = 1
        finally:
            self._ended.set()
            if self.communicator is not None:
                self.communicator.close()
            self._link.close()
            if self._memory >= 0:
                os.close(self._memory)
        return self._code

    def _say_why(self, error: Exception) -> None:
        refused = isinstance(error, AssemblyError | CheckpointError)
        text = error.text().removeprefix("engine: ") if isinstance(error, AssemblyError) else describe_error(error)
        if not refused:
            log_own(error)
        refused = refused or (by_plugin(error) and not waited(error))
        with contextlib.suppress(OSError):
            self._link.send(Broken(text, self._where(), refused, waited(error)))

    def _listen(self) -> None:
        """Take in messages; the connection's end is this worker's."""
        try:
            while (message := self._link.receive()) is not None:
                self._inbox.put(message)
        except (ValueError, OSError):
            if not self._ended.is_set():
                traceback.print_exc()
        if self._ended.is_set():
            return
        self._ended.set()
        self._inbox.put(None)
        if self.communicator is not None:
            self.communicator.abort("the engine process is gone")
        if self._exits:
            time.sleep(LAST_S)
            os._exit(1)

    def _beat(self) -> None:
        with contextlib.suppress(OSError):
            while not self._ended.is_set():
                self._link.send(Beat(self._where()))
                self._ended.wait(BEAT_S)

    def _result(self, result: StepResult) -> None:
        self._link.send(Result(result))

    def _stored(self, number: int, well: bool) -> None:
        self._link.send(Stored(number, well))

    def _failed(self, error: Exception) -> None:
        """A step raised; the engine process ends all ranks."""
        self._code = 1
        with contextlib.suppress(OSError):
            self._link.send(Broken(describe_error(error), self._where(), waited=waited(error)))
        self._inbox.put(None)

    def _work(self) -> None:
        self._link.send(hello())
        assignment = self._next(Assignment)
        self._where = lambda: Where("reading the plan")
        plan = EnginePlan.from_json(assignment.plan)
        self._link.send(present(plan))
        self._next(Begin)
        described = describe_model(plan)
        begin_kernels(plan, described.graph)
        self._where = lambda: Where("import torch")
        from engine.kv.records import Part, own_records, shared_records
        from engine.ranks.steps import RankSteps
        from engine.startup.rank import Rank

        rank = Rank(plan, assignment.rank, threads=assignment.threads, described=described)
        self._where = rank.status.where
        rank.bind()
        self.communicator = rank.communicator
        rank.plan_memory()
        self._link.send(Bound())
        rank.meet(self._next(Meet).invitation, assignment.host)
        self._link.send(Loaded(rank.load()))
        rank.allocate(self._next(Allocate).num_blocks)
        self._link.send(Built(rank.info(f"pid {os.getpid()}"), rank.notes()))
        rank.status.doing = ""
        steps = RankSteps(
            rank.runner, rank.worker, rank.status, self._result if rank.chooses else _ignore, self._failed
        )
        while True:
            match self._next(Run, Store, OpenMemory, KeepRecords):
                case Run(plan=step):
                    steps.run(step)
                case Store(number, moves):
                    steps.store(moves, partial(self._stored, number))
                case OpenMemory() as opening:
                    self._link.send(Opened(self._open(opening)))
                case KeepRecords(num_slots, ()):
                    rank.runner.records = own_records(rank.runner.kv, num_slots)
                case KeepRecords(num_slots, offsets, parts):
                    own = [Part(*part) for part in parts]
                    rank.runner.records = shared_records(rank.runner.kv, self._memory, offsets, num_slots, own)

    def _open(self, opening: OpenMemory) -> str:
        """Why it cannot be opened; empty: it is."""
        try:
            self._memory = opened(opening)
        except OSError as error:
            return str(error)
        return ""

    def _next(self, *kinds: type[M]) -> M:
        """The next message, which must be of one of these kinds. Raises :class:`Gone`."""
        message = self._inbox.get()
        if message is None:
            raise Gone(1)
        if isinstance(message, End):
            raise Gone(TURNED_AWAY if message.why else 0, message.why)
        if not isinstance(message, kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"the engine process sent {type(message).__name__}, expected {expected}")
        return message


def _ignore(result: StepResult) -> None:
    """Another rank has chosen the same tokens."""


def run(connection: socket.socket) -> None:
    """A worker in the thread that calls this: see :attr:`engine.contracts.parallelism.WorkerStart.run`."""
    Worker(to_driver(connection), exits=False).run()


def address_of(text: str) -> tuple[str, int]:
    """Of ``HOST:PORT``. Raises ``ValueError``."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"--join {text}: expected HOST:PORT, such as 10.0.0.1:29600")
    return host.strip("[]"), int(port)


def join(address: str, rank: int = -1, seconds: float = JOIN_S) -> socket.socket | None:
    """Connect to an engine process that waits for workers at ``HOST:PORT``, and say who this is: a line of the token in
    the environment and the rank (-1: any). What is waited for is said on stderr. ``None``: nobody was there for so
    long. Raises :class:`TurnedAway`."""
    ends, said = time.monotonic() + seconds, ""
    while True:
        try:
            connection = socket.create_connection(address_of(address), timeout=5.0)
        except OSError as error:
            if time.monotonic() > ends:
                return None
            if said != str(error):
                said = str(error)
                say(f"nobody is at {address} yet ({said}); trying for another {ends - time.monotonic():.0f} s")
            time.sleep(0.2)
            continue
        connection.settimeout(SILENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREACHED_S))
        try:
            connection.sendall(f"{os.environ.get(TOKEN, '')} {rank}\n".encode())
            answer = _line(connection, address)
        except OSError:
            answer = ""
        if answer == WELCOME:
            connection.settimeout(None)
            return connection
        connection.close()
        if answer:
            raise TurnedAway(answer)
        time.sleep(0.2)  # it ended before it took anybody in


def _line(connection: socket.socket, address: str) -> str:
    """What comes, to the end of the line; empty where the connection ends before."""
    said = b""
    while not said.endswith(b"\n"):
        try:
            part = connection.recv(1)
        except TimeoutError:
            say(
                f"{address} has said nothing for {SILENCE_S:.0f} s: an engine that wants no further worker now, "
                "which is waited for, or no engine at all"
            )
            connection.settimeout(None)
            continue
        if not part:
            return ""
        said += part
    return said.decode(errors="replace").strip()


def say(what: str) -> None:
    """On stderr."""
    sys.stderr.write(f"engine worker: {what}\n")  # in one piece: others write there, too
    sys.stderr.flush()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="engine.startup.worker")
    parser.add_argument("--fd", type=int)
    parser.add_argument("--parent", type=int)
    parser.add_argument("--join")
    parser.add_argument("--rank", type=int, default=-1)
    given = parser.parse_args(arguments)
    if given.parent is not None:
        end_with(given.parent)
    keep_output()
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the engine process says when to end
        signal.signal(number, signal.SIG_IGN)
    try:
        connection = socket.socket(fileno=given.fd) if given.fd is not None else join(given.join, given.rank)
    except TurnedAway as why:
        say(f"the engine at {given.join} turns this worker away: {why}")
        return TURNED_AWAY
    if connection is None:
        say(f"nobody waits for workers at {given.join}")
        return NOBODY_THERE
    worker = Worker(to_driver(connection), exits=True)
    code = worker.run()
    if worker.why and given.fd is None:  # a child's engine process says it itself, in the same place
        say(f"the engine at {given.join} does not start: {worker.why}")
    return code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread may still be in a call that never ends
