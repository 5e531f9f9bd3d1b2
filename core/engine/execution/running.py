"""A step between its launch and its result: on a GPU the device may still be at it, or not have begun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from engine.contracts.drafter import DraftRows, DraftTokens
from engine.execution.logprobs import Ranked, listed
from engine.execution.step import RowResult, StepPlan, StepResult
from engine.execution.transfer import Mark, download, elapsed_ms
from engine.execution.verify import Choice, Verified, judge, on_host, tensors_of


@dataclass(frozen=True, slots=True)
class Sampled:
    """The rows of a plan that got a token, and what it is."""

    indices: tuple[int, ...]
    """Into the rows of the plan."""
    choice: Choice


@dataclass(frozen=True, slots=True)
class RecordedDrafts:
    """What a replayed drafter proposed."""

    tokens: Tensor
    """int64 ``[>= num_rows, width]``, on the device: for each row of the plan, whether it wants drafts or not."""
    ended: Mark


class RunningStep:
    """A step that was handed to the device."""

    def __init__(
        self,
        plan: StepPlan,
        sampled: Sampled | None,
        prompts: Mapping[int, tuple[Ranked, ...]],
        times: tuple[Mark | None, Mark, Mark],
        drafts: RecordedDrafts | None = None,
    ) -> None:
        self._plan = plan
        self.sampled = sampled
        self._prompts = prompts
        self._times = times
        self._verified: list[Verified] | None = None
        self._drafts: dict[int, tuple[tuple[int, ...], Tensor | None]] = {}
        self._recorded_drafts = drafts
        self.draft_ms = 0.0
        """Milliseconds in a drafter on the device, by the host's clock; a replayed one's are between marks."""
        self.late_ms, self.late_steps = 0.0, 0
        """See :attr:`StepResult.late_ms`."""
        self.recorded = False
        """See :attr:`StepResult.recorded`."""
        choice = () if sampled is None else tensors_of(sampled.choice)
        ranked = (tensor for parts in prompts.values() for part in parts for tensor in part)
        proposed = () if drafts is None else (drafts.tokens,)
        self._arriving = download((*choice, *ranked, *proposed))
        self._num_choice = len(choice)

    def verified(self) -> list[Verified]:
        """The verdict on each row of the plan; waits for the device."""
        if self._verified is None:
            tensors = self._arriving.wait()
            found = [Verified((), 0, ())] * len(self._plan.rows)
            if self.sampled is not None:
                verdicts = judge(on_host(self.sampled.choice, tensors[: self._num_choice]))
                for i, verdict in zip(self.sampled.indices, verdicts, strict=True):
                    found[i] = verdict
            self._verified = found
        return self._verified

    def propose(self, rows: DraftRows, proposed: DraftTokens) -> None:
        """Add what a drafter on the device proposed for some rows of the plan. Waits for the device."""
        if not rows.index:
            return
        tokens: list[list[int]] = proposed.tokens.tolist()
        for at, (i, width) in enumerate(zip(rows.index, rows.widths, strict=True)):
            probs = None if proposed.probs is None else proposed.probs[at, :width]
            self._drafts[i] = (tuple(tokens[at][:width]), probs)

    def _take_recorded(self, verified: list[Verified], drafts: RecordedDrafts) -> None:
        """What a replay proposed for the rows that want drafts and got a token."""
        tokens: list[list[int]] = self._arriving.wait()[-1].tolist()
        for i, (row, verdict) in enumerate(zip(self._plan.rows, verified, strict=True)):
            if row.wants_drafts > 0 and verdict.tokens:
                self._drafts[i] = (tuple(tokens[i][: row.wants_drafts]), None)
        self.draft_ms = elapsed_ms(self._times[2], drafts.ended)

    def result(self) -> StepResult:
        """Everything the step came to; waits for the device."""
        verified = self.verified()
        if self._recorded_drafts is not None:
            self._take_recorded(verified, self._recorded_drafts)
        tensors = iter(self._arriving.wait()[self._num_choice :])
        prompts = {
            i: tuple(entry for _ in parts for entry in listed(*(next(tensors) for _ in range(4))))
            for i, parts in self._prompts.items()
        }
        rows = []
        for i, verdict in enumerate(verified):
            drafts, draft_probs = self._drafts.get(i, ((), None))
            rows.append(
                RowResult(
                    tokens=verdict.tokens,
                    num_accepted=verdict.num_accepted,
                    logprobs=verdict.logprobs,
                    prompt_logprobs=prompts.get(i, ()),
                    drafts=drafts,
                    draft_probs=draft_probs,
                    error=verdict.error,
                )
            )
        before, started, ended = self._times
        return StepResult(
            self._plan.plan_id,
            tuple(rows),
            device_ms=elapsed_ms(started, ended),
            draft_ms=self.draft_ms,
            idle_ms=0.0 if before is None else elapsed_ms(before, started),
            late_ms=self.late_ms,
            late_steps=self.late_steps,
            recorded=self.recorded,
        )
