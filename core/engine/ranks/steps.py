"""Steps over several ranks: every plan goes to all of them, and the one that chooses tokens has the result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from engine.contracts.communicator import Communicator
from engine.contracts.parallelism import Launcher
from engine.ranks.blame import log_own
from engine.ranks.messages import KeepRecords, Opened, OpenMemory, Where
from engine.ranks.workers import Workers
from engine.step.plan import RecordMove, StepPlan, StepResult
from engine.step.runner import DeviceQueue, DeviceWorker, ModelRunner


class RankStatus:
    """How far this rank is: written by its device's thread, read by others."""

    def __init__(self, doing: str = "starting") -> None:
        self.doing = doing
        """During start-up; empty once plans come."""
        self.begun: Callable[[], int] = int
        """See :attr:`engine.contracts.communicator.Communicator.begun`."""
        self._plan = -1
        self._before = 0
        """Calls that were begun before this plan."""
        self._working = False

    def begin(self, plan_id: int) -> None:
        self._plan, self._before, self._working = plan_id, self.begun(), True

    def end(self) -> None:
        self._working = False

    def where(self) -> Where:
        if self.doing:
            return Where(self.doing)
        return Where("", self._plan, self.begun() - self._before if self._working else 0, self._working)


class RankSteps:
    """This rank's part of every step, in order."""

    def __init__(
        self,
        runner: ModelRunner,
        worker: DeviceWorker,
        status: RankStatus,
        done: Callable[[StepResult], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """``done`` and ``failed`` are called by the thread that computes, or on a GPU by one that waits for it."""
        self._queue = DeviceQueue(runner, DeviceWorker(own_thread=False))
        self._worker = worker
        # A GPU is still at a step when its launch returns; the next one must not wait for it.
        self._waiting = DeviceWorker(own_thread=runner.tables.device != "cpu")
        self._status = status
        self._done = done
        self._failed = failed
        self._broken = False

    def run(self, plan: StepPlan) -> None:
        """Queue a plan."""
        self._worker.start(partial(self._run, plan))

    def store(self, moves: Sequence[RecordMove], done: Callable[[bool], None]) -> None:
        """As :meth:`DeviceQueue.store`, of this rank's parts."""
        self._worker.start(partial(self._queue.store, moves, done))

    def close(self, seconds: float = 2.0) -> bool:
        """Wait for what is queued, for so long; whether that has ended."""
        closing = threading.Thread(target=self._close, daemon=True)
        closing.start()
        closing.join(seconds)
        return not closing.is_alive()

    def _close(self) -> None:
        self._worker.close()
        self._queue.close()
        self._waiting.close()

    def _run(self, plan: StepPlan) -> None:
        if self._broken:
            return
        self._status.begin(plan.plan_id)
        try:
            result = self._queue.launch(plan)
        except Exception as error:
            self._fail(error)
            return
        self._waiting.start(partial(self._finish, result))

    def _finish(self, result: Callable[[], StepResult]) -> None:
        try:
            found = result()
        except Exception as error:
            self._fail(error)
            return
        self._status.end()
        self._done(found)

    def _fail(self, error: Exception) -> None:
        self._broken = True
        log_own(error)
        self._failed(error)


class RankedDevice:
    """Fulfils :class:`engine.loop.core.Device`: rank 0's part runs here, the others' on their workers.

    Any error on any rank is a :class:`~engine.step.plan.DeviceBroken`: what the others have computed does not go
    together with it any more.
    """

    def __init__(self, steps: RankSteps, workers: Workers, launcher: Launcher, communicator: Communicator) -> None:
        self._steps = steps
        self._workers = workers
        self._launcher = launcher
        self._communicator = communicator

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        self._workers.run(plan)
        self._steps.run(plan)
        if plan.loads:  # whoever chooses tokens may be done before another rank has copied them
            self._when_loaded(self._workers.loading(plan.plan_id))
        return partial(self._workers.result, plan.plan_id)

    def open_memory(self, opening: OpenMemory) -> dict[int, str]:
        """Have further ranks open the memory of rank 0. Returns why some cannot, by rank."""
        self._workers.send(opening)
        found = self._workers.replies(Opened)
        return {rank: opened.problem for rank, opened in sorted(found.items()) if opened.problem}

    def keep_records(self, kept: Sequence[KeepRecords]) -> None:
        """Have further ranks keep their parts of records. ``kept``: what each is told, by rank."""
        for rank in self._workers.places():
            self._workers.send(kept[rank], rank)

    def store(self, moves: Sequence[RecordMove], done: Callable[[bool], None]) -> None:
        """As :meth:`DeviceQueue.store`, on every rank; what one has not copied, none has."""
        self._steps.store(moves, self._workers.store(moves, done))

    def _when_loaded(self, done: Callable[[bool], None]) -> None:
        """Call it once the records of the plans so far are in the blocks of every rank: a store of no blocks is done
        then."""
        self.store((), done)

    def resume(self) -> None:
        raise AssertionError("an engine of several ranks does not go on after a failure")

    def close(self) -> None:
        self._workers.close()
        self._launcher.close()
        if self._workers.failure is not None:
            self._communicator.abort(self._workers.failure)
        if self._steps.close():
            self._communicator.close()
