"""How far predicted step times were off lately, by kind of step."""

from __future__ import annotations

from collections import deque
from statistics import median

import msgspec

from engine.contracts.step_cost import DraftCost, StepCost, StepWork

MEMORY = 256
"""Steps of each kind."""
NOISY, FEWEST = 0.3, 32
"""Beside a client on the same cores predictions are off by 5 to 25 %; and steps to say more."""


class StepErrorReport(msgspec.Struct, frozen=True):
    """Of predictions made before their steps: relative to what a step took; 0 before the first."""

    kind: str
    """``decode``, ``prefill``, or ``mixed`` for both in one step."""
    num_steps: int
    median_error: float
    """Of the absolute errors."""
    bias: float
    """Median of the signed errors; above 0 the prediction is too long."""


class StepCostReport(msgspec.Struct, frozen=True):
    """Coefficients, what they were fitted to, and their errors."""

    cost: StepCost
    errors: tuple[StepErrorReport, ...] = ()
    drafts: DraftCost | None = None
    """Known of costs that were kept; ``None``: nothing was drafted, or it is not known."""

    @property
    def words(self) -> str:
        """The errors in words; empty: none are known."""
        told = ", ".join(f"{error.kind} steps {error.median_error:.0%}" for error in self.errors)
        busy = any(error.median_error > NOISY and error.num_steps >= FEWEST for error in self.errors)
        more = "; something else used the device meanwhile, so measure again when it does not" if busy else ""
        return told and f"median error of the last predictions: {told}{more}"

    def told_with(self, source: str) -> str:
        """Where the costs are from, and their errors if any are known."""
        return "; ".join(filter(None, (source, self.words)))


class StepErrors:
    """The latest errors, in constant memory."""

    def __init__(self) -> None:
        self._recent = {kind: deque[float](maxlen=MEMORY) for kind in ("decode", "prefill", "mixed")}

    def add(self, work: StepWork, error: float) -> None:
        kind = "decode" if not work.prefill_context else "mixed" if work.decode_context else "prefill"
        self._recent[kind].append(error)

    def reports(self) -> tuple[StepErrorReport, ...]:
        of_kinds = (
            StepErrorReport(kind, len(errors), median(map(abs, errors)), median(errors))
            for kind, errors in self._recent.items()
            if errors
        )
        return tuple(of_kinds)
