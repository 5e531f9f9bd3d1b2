"""The workers of an engine with several ranks, as the engine process sees them: what they say, and whether they live.

Whatever goes wrong on one rank is the end of all: :attr:`Workers.failure` says which rank was where.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from functools import partial
from itertools import count
from typing import TypeVar

from engine.contracts.parallelism import StartedWorker
from engine.plugin_guard.calls import describe_error
from engine.ranks.blame import waited
from engine.ranks.link import Link, to_workers
from engine.ranks.messages import Beat, Broken, Built, End, FromWorker, Result, Run, Store, Stored, ToWorker, Where
from engine.step.plan import RankFailed, RecordMove, StepPlan, StepResult

M = TypeVar("M")
Done = Callable[[bool], None]

POLL_S = 0.1
"""How often the ranks are looked at."""
GRACE_S = 0.3
"""After the first sign of a failure: what else happened comes to light."""
STARTING_SILENCE_S = 60.0
"""How long a worker that starts may say nothing: libraries are loaded, and nothing else runs meanwhile."""
SILENT_S = 4.0
"""Who has said nothing for so long when something fails is to blame."""
TOO_LONG = " (a step that takes longer needs a larger parallelism.timeout_s or a smaller scheduler.token_budget)"
ENDING_S = 3.0
"""How long a worker may take to end by itself."""


class Blame(IntEnum):
    """What is known of a rank when all fail, from the likeliest cause on."""

    ENDED = auto()
    SILENT = auto()
    BROKEN = auto()
    NOBODY_KNOWN = auto()
    IN_VAIN = auto()
    """It waited for another rank."""
    NONE = auto()


@dataclass(slots=True)
class _Storing:
    """Blocks that ranks copy to slots."""

    left: int
    """Ranks that have not answered."""
    done: Done
    well: bool = True


@dataclass(slots=True)
class _Worker:
    started: StartedWorker
    link: Link[FromWorker]
    replies: deque[FromWorker] = field(default_factory=deque)
    where: Where = field(default_factory=Where)
    silent_s: float = 0.0
    ended: str = ""
    """How, once the connection has ended."""
    deaf: str = ""
    """Why nothing can be sent to it."""
    error: str = ""
    """Its own words."""
    waited: bool = False
    """For another rank, in vain."""
    refused: bool = False

    @property
    def name(self) -> str:
        return f"rank {self.started.rank} ({self.started.place})"


class Workers:
    """Sends to all workers, and gathers what they send. Any thread may call.

    A rank that says nothing for ``limit_s`` is taken for stopped; so are all when a plan is in hand and no rank gets on
    for as long. Time is counted in looks, not by a clock: what this process missed while it was stopped is nobody
    else's silence.
    """

    def __init__(
        self,
        started: Sequence[StartedWorker],
        limit_s: float,
        local: Callable[[], Where],
        on_failure: Callable[[str], None],
    ) -> None:
        """``local``: where rank 0 is; ``on_failure``: called once, by a thread of its own."""
        self._workers = {one.rank: _Worker(one, to_workers(one.connection)) for one in started}
        self._limit_s = limit_s
        self._local = local
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._results: dict[int, StepResult] = {}
        self._in_flight: set[int] = set()
        self._loading: set[int] = set()
        """Plans whose records are not in the blocks of all ranks, as far as is known."""
        self._storing: dict[int, _Storing] = {}
        self._stores = count()
        self._local_error, self._local_where, self._local_waited = "", Where(), False
        self._first_sign_s: float | None = None
        """When something was seen to be wrong."""
        self._why = ""
        self._starting = True
        self._closing = False
        self.failure: str | None = None
        self.refused = False
        """The configuration cannot run on some rank, which is the failure."""
        threads = [threading.Thread(target=self._watch, name="ranks", daemon=True)]
        for rank, worker in self._workers.items():
            worker.link.limit_sending(limit_s)
            reading = partial(self._read, worker)
            threads.append(threading.Thread(target=reading, name=f"rank {rank}", daemon=True))
        for thread in threads:
            thread.start()

    # To workers -----------------------------------------------------------------------------------------------------

    def send(self, message: ToWorker, rank: int | None = None) -> None:
        """To one worker, or to all. One that is gone is noticed where an answer is waited for."""
        workers = self._workers.values() if rank is None else (self._workers[rank],)
        frame = b""
        for worker in workers:
            frame = frame or worker.link.frame(message)
            try:
                worker.link.send_frame(frame)
            except OSError as error:
                self._wrong(worker, f"takes no messages: {error}")

    def run(self, plan: StepPlan) -> None:
        """Have all workers execute a plan; its result is waited for with :meth:`result`."""
        with self._changed:
            self._starting = False
            self._in_flight.add(plan.plan_id)
        self.send(Run(plan))

    def store(self, moves: Sequence[RecordMove], done: Done) -> Done:
        """Have all workers copy blocks to slots. ``done`` is called, by any thread, once they and rank 0 have answered:
        whether all went well on all. Returns what takes rank 0's answer."""
        number = next(self._stores)
        with self._changed:
            self._storing[number] = _Storing(1 + len(self._workers), done)
        self.send(Store(number, tuple(moves)))
        return partial(self._stored, number)

    def loading(self, plan_id: int) -> Done:
        """The result of a plan is not there before this was called."""
        with self._changed:
            self._loading.add(plan_id)
        return partial(self._loaded, plan_id)

    # From workers ---------------------------------------------------------------------------------------------------

    def replies(self, kind: type[M], seen: Callable[[str], None] = lambda text: None) -> dict[int, M]:
        """The next message of each worker, which must be of this kind, by rank. ``seen``: what is waited for. Raises
        :class:`RankFailed`."""
        found: dict[int, M] = {}
        with self._changed:
            while True:
                for rank, worker in self._workers.items():
                    if rank not in found and worker.replies:
                        reply = worker.replies.popleft()
                        if not isinstance(reply, kind):
                            raise RankFailed(f"{worker.name} sent {reply!r}, expected {kind.__name__}")
                        found[rank] = reply
                missing = [worker for rank, worker in self._workers.items() if rank not in found]
                if not missing:
                    return found
                if self.failure is not None:
                    raise RankFailed(self.failure)
                seen("; ".join(f"rank {worker.started.rank} is {worker.where}" for worker in missing))
                self._changed.wait(1.0)

    def result(self, plan_id: int) -> StepResult:
        """Wait for a plan's result. Raises :class:`RankFailed`."""
        with self._changed:
            while plan_id not in self._results or plan_id in self._loading:
                if self.failure is not None:
                    raise RankFailed(self.failure)
                self._changed.wait()
            return self._results.pop(plan_id)

    def deliver(self, result: StepResult) -> None:
        """A plan's result, of whoever chooses tokens."""
        with self._changed:
            self._in_flight.discard(result.plan_id)
            self._results[result.plan_id] = result
            self._changed.notify_all()

    def _loaded(self, plan_id: int, well: bool) -> None:
        with self._changed:
            self._loading.discard(plan_id)
            self._changed.notify_all()

    def _stored(self, number: int, well: bool) -> None:
        with self._changed:
            storing = self._storing[number]
            storing.left -= 1
            storing.well &= well
            if storing.left:
                return
            del self._storing[number]
        storing.done(storing.well)

    # Failure --------------------------------------------------------------------------------------------------------

    def local_failed(self, error: Exception) -> None:
        """Rank 0 itself cannot go on."""
        with self._changed:
            if not self._local_error:
                self._local_error, self._local_where, self._local_waited = (
                    describe_error(error),
                    self._local(),
                    waited(error),
                )
            self._sign()

    def explain(self, error: Exception) -> str:
        """What is known about an error that rank 0 met, which another rank may have caused."""
        self.local_failed(error)
        with self._changed:
            while self.failure is None:
                self._changed.wait()
            return self.failure

    def places(self) -> dict[int, str]:
        return {rank: worker.started.place for rank, worker in self._workers.items()}

    def close(self, why: str = "") -> None:
        """Have all workers end, and wait a moment for that. ``why``: see :class:`End`."""
        with self._changed:
            self._closing = True
        if self.failure is None:
            self.send(End(why))
            ends = time.monotonic() + ENDING_S
            while time.monotonic() < ends and any(w.started.ended() is None for w in self._workers.values()):
                time.sleep(0.01)
        for worker in self._workers.values():
            worker.link.close()

    def _read(self, worker: _Worker) -> None:
        try:
            while (message := worker.link.receive()) is not None:
                self._take(worker, message)
            why = ""
        except (ValueError, OSError) as error:
            why = f"sent what is no message: {error}"
        ends, how = time.monotonic() + GRACE_S, None
        while how is None and time.monotonic() < ends and not self._closing:
            how = worker.started.ended()
            time.sleep(0.01)
        with self._changed:
            worker.ended = why or f"ended with {how}" if how else why or "closed its connection"
            self._sign()

    def _take(self, worker: _Worker, message: FromWorker) -> None:
        if isinstance(message, Result):
            self.deliver(message.result)
        elif isinstance(message, Stored):
            self._stored(message.number, message.well)
        with self._changed:
            worker.silent_s = 0.0
            match message:
                case Beat(where):
                    worker.where = where
                case Broken(error, where, refused, has_waited):
                    worker.where, worker.error, worker.refused, worker.waited = where, error, refused, has_waited
                    self._sign()
                case Result() | Stored():
                    pass
                case Built():
                    worker.where = Where()
                    worker.replies.append(message)
                    self._changed.notify_all()
                case _:
                    worker.replies.append(message)
                    self._changed.notify_all()

    def _wrong(self, worker: _Worker, why: str) -> None:
        with self._changed:
            worker.deaf = worker.deaf or why
            self._sign()

    def _sign(self) -> None:
        """Something went wrong: it is told in a moment, when all is known."""
        if self._first_sign_s is None:
            self._first_sign_s = time.monotonic()

    def _watch(self) -> None:
        looked_s, stuck_s = time.monotonic(), 0.0
        seen: tuple[Where, ...] = ()
        while not self._closing:
            time.sleep(POLL_S)
            now = time.monotonic()
            passed_s, looked_s = min(now - looked_s, 2 * POLL_S), now
            with self._changed:
                wheres = (self._local(), *(worker.where for worker in self._workers.values()))
                is_busy = bool(self._in_flight or self._loading)
                stuck_s = stuck_s + passed_s if is_busy and wheres == seen else 0.0
                seen = wheres
                self._look(passed_s, stuck_s)
                if self.failure is None and self._first_sign_s is not None and now - self._first_sign_s >= GRACE_S:
                    self.refused = any(worker.refused for worker in self._workers.values())
                    self.failure = self._told()
                    self._changed.notify_all()
                failure = self.failure
            if failure is not None:
                if not self._closing:
                    self._on_failure(failure)
                return

    def _look(self, passed_s: float, stuck_s: float) -> None:
        limit = STARTING_SILENCE_S if self._starting else self._limit_s
        for worker in self._workers.values():
            worker.silent_s += passed_s
            if worker.silent_s > limit:
                self._sign()
        if stuck_s > self._limit_s:
            self._why = f"no rank got on for {self._limit_s:g} s"
            if all(worker.silent_s < SILENT_S for worker in self._workers.values()):
                self._why += TOO_LONG
            self._sign()

    def _told(self) -> str:
        """Which rank was where; who is to blame comes first."""
        if self._local_error:
            blame = Blame.IN_VAIN if self._local_waited else Blame.BROKEN
            found = [(blame, f"rank 0 failed {self._local_where}: {self._local_error}")]
        else:
            found = [(Blame.NONE, f"rank 0 is {self._local()}")]
        if self._why:
            found.append((Blame.NOBODY_KNOWN, self._why))
        for worker in self._workers.values():
            place = f"last seen {worker.where}"
            if worker.refused:
                return f"rank {worker.started.rank}: {worker.error}"
            if worker.ended and not worker.error:
                found.append((Blame.ENDED, f"{worker.name} {worker.ended}, {place}"))
            elif worker.error or worker.deaf:
                blame = Blame.IN_VAIN if worker.waited else Blame.BROKEN
                found.append((blame, f"{worker.name} failed {worker.where}: {worker.error or worker.deaf}"))
            elif worker.silent_s > min(self._limit_s, SILENT_S):
                silence = f"has said nothing for {worker.silent_s:.0f} s"
                found.append((Blame.SILENT, f"{worker.name} {silence}, {place}"))
            else:
                found.append((Blame.NONE, f"{worker.name} is {worker.where}"))
        return "; ".join(text for _, text in sorted(found, key=lambda each: each[0]))
