"""The in-flight ledger: steps that were launched and not yet collected, and what may only be reused after them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.loop.sequence import Sequence
from engine.loop.step_work import NO_CONTENTS, StepContents
from engine.step.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step. ``owners[i]`` is row i's sequence and its epoch when the step was planned."""

    plan: StepPlan
    owners: tuple[tuple[Sequence, int], ...]
    wait: Callable[[], StepResult]
    started_s: float
    planning_ms: float
    preemptions: int
    follows_on: bool
    """Requests were running when this step was planned: time the device waited for it was lost."""
    asked: tuple[int, ...]
    """See :class:`engine.loop.planning.Planned`."""
    draft_ms: float = 0.0
    """Of ``planning_ms``: in a drafter on the host."""
    contents: StepContents = NO_CONTENTS


class Ledger:
    """Launched steps in order, and releases that wait for them."""

    def __init__(self) -> None:
        self._steps: deque[InFlight] = deque()
        self._releases: deque[tuple[int, Callable[[], None]]] = deque()
        self._retired = -1

    def __len__(self) -> int:
        return len(self._steps)

    def launched(self, step: InFlight) -> None:
        self._steps.append(step)

    def __iter__(self) -> Iterator[InFlight]:
        return iter(self._steps)

    def oldest(self) -> InFlight:
        return self._steps[0]

    def retire(self) -> None:
        """The oldest step is done: run the releases that waited for it."""
        self._retired = self._steps.popleft().plan.plan_id
        while self._releases and self._releases[0][0] <= self._retired:
            self._releases.popleft()[1]()

    def skip(self, plan_id: int) -> None:
        """A simulator has made the plans up to this one itself, and they have retired; none is in flight."""
        self._retired = plan_id

    def after(self, plan_id: int, release: Callable[[], None]) -> None:
        """Run ``release`` once plan ``plan_id`` has retired (now, if it has)."""
        if plan_id <= self._retired:
            release()
            return
        at = len(self._releases)
        while at and self._releases[at - 1][0] > plan_id:
            at -= 1
        self._releases.insert(at, (plan_id, release))
