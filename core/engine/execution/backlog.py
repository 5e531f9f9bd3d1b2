"""Decode steps that a drafter on the device has not been told of yet.

Keeping up with the target costs a call for every step, also while nobody wants drafts. So plain decode steps of the
same requests are collected, and told together when somebody wants drafts, when there are enough of them, or when
anything else happens: a block that is shared or given to somebody else must have been written by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch
from engine.contracts.drafter import TargetStep
from engine.execution.places import Place
from engine.execution.step import StepPlan

MOST_WAITING = 64
"""Tokens kept at once: bounds memory, and how long the first drafts wait."""


@dataclass(slots=True)
class _Kept:
    step: TargetStep
    attention: AttentionBatch
    slot_mapping: Tensor


class Backlog:
    """Steps of one token for each of the same requests, in order."""

    def __init__(self) -> None:
        self._next: tuple[tuple[int, int], ...] = ()
        """Slot and position of what may follow."""
        self._kept: list[_Kept] = []

    def takes(self, plan: StepPlan) -> bool:
        """Whether a plan's step may wait with those kept already; if not, they come first (:attr:`whole`).

        A block can only be given away or shared by a request that is no row any more, or to one that is admitted.
        """
        plain = all(row.num_queries == 1 and row.samples and row.wants_drafts == 0 for row in plan.rows)
        quiet = plain and plan.drafter_follows and not plan.admits
        fits = (len(self._kept) + 1) * len(plan.rows) <= MOST_WAITING
        return quiet and fits and (not self._kept or self._next == tuple((row.slot, row.start) for row in plan.rows))

    def add(self, plan: StepPlan, step: TargetStep, place: Place) -> None:
        """Keep a step that :meth:`takes` said yes to. Its tensors must stay as they are."""
        self._next = tuple((row.slot, row.start + 1) for row in plan.rows)
        self._kept.append(_Kept(step, place.attention, place.slot_mapping))

    @property
    def whole(self) -> TargetStep | None:
        """All of them as one step, each request's tokens together; ``None``: there are none."""
        if not self._kept:
            return None
        steps, rows = [kept.step for kept in self._kept], len(self._next)
        last, count = self._kept[-1].attention, len(steps)
        starts = list(accumulate([count] * rows, initial=0))
        attention = replace(
            last, q_lens=(count,) * rows, q_starts=torch.tensor(starts, dtype=torch.int32, device=last.q_starts.device)
        )
        positions = _by_request([step.positions for step in steps])
        return TargetStep(
            tokens=_by_request([step.tokens for step in steps]),
            next_tokens=_by_request([step.next_tokens for step in steps]),
            positions=positions,
            q_lens=attention.q_lens,
            slots=_by_request([step.slots for step in steps]),
            taps=tuple(_by_request(taps) for taps in zip(*(step.taps for step in steps), strict=True)),
            place=Place(positions, _by_request([kept.slot_mapping for kept in self._kept]), attention),
            drafts_follow=False,
        )

    def __len__(self) -> int:
        """Steps."""
        return len(self._kept)

    def clear(self) -> None:
        self._kept.clear()


def _by_request(steps: Sequence[Tensor]) -> Tensor:
    """``[num_rows, ...]`` each -> ``[num_rows * steps, ...]``."""
    return torch.stack(tuple(steps), dim=1).flatten(0, 1)
