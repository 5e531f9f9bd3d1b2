"""A step between its launch and its result: on a GPU the device may still be at it, or not have begun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from engine.kernels.transfer import Mark, download, elapsed_ms
from engine.sampling.logprobs import Ranked, listed
from engine.sampling.verify import Choice, Verified, results
from engine.step.plan import DrafterBroken, RowResult, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Sampled:
    """The rows of a plan that get a token, and what it is."""

    indices: tuple[int, ...]
    """Into the rows of the plan."""
    choice: Choice
    errors: Mapping[int, str] = field(default_factory=dict)
    """By number among these rows: why one cannot go on, whatever was chosen for it."""


@dataclass(frozen=True, slots=True)
class Times:
    """Moments of a step."""

    previous: Mark | None
    """When the step before it was done, drafting included."""
    loading: Mark
    """When it began to copy records; ``started`` where it has none."""
    started: Mark
    sampled: Mark
    ended: Mark
    """With what a drafter on the device did after it."""


class RunningStep:
    """A step that was handed to the device."""

    def __init__(
        self,
        plan: StepPlan,
        sampled: Sampled | None,
        prompts: Mapping[int, tuple[Ranked, ...]],
        times: Times,
        drafts_valid: Tensor | None = None,
        drafts: Tensor | None = None,
        captured: bool = False,
    ) -> None:
        """``prompts``: logprobs of prompt tokens by row of the plan; ``drafts_valid``: bool, whether all drafts that a
        drafter proposed after the step are tokens; ``drafts``: int64 ``[R, most]``, these drafts, where the host is
        to have them; ``captured``: the step was replayed."""
        self._plan = plan
        self._sampled = sampled
        self._prompts = prompts
        self._times = times
        self._captured = captured
        choice = () if sampled is None else sampled.choice.tensors
        ranked = [tensor for parts in prompts.values() for part in parts for tensor in part]
        self._relays_drafts = drafts is not None
        proposed = () if drafts is None else (drafts,)
        flags = () if drafts_valid is None else (drafts_valid,)
        self._arriving = download((*choice, *ranked, *proposed, *flags))
        self._num_choice = len(choice)
        self._checks_drafts = drafts_valid is not None

    def result(self) -> StepResult:
        """Everything the step came to; waits for the device. Raises :class:`DrafterBroken`."""
        tensors = self._arriving.wait()
        if self._checks_drafts and not bool(tensors[-1]):
            raise DrafterBroken("proposed token ids outside of the vocabulary")
        found = [Verified((), 0)] * len(self._plan.rows)
        if self._sampled is not None:
            verdicts = results(self._sampled.choice, tensors[: self._num_choice])
            for number, (i, verdict) in enumerate(zip(self._sampled.indices, verdicts, strict=True)):
                error = self._sampled.errors.get(number)
                found[i] = verdict if error is None else Verified((), 0, error=error)
        rest = iter(tensors[self._num_choice :])
        prompts = {
            i: tuple(entry for _ in parts for entry in listed(*(next(rest) for _ in range(4))))
            for i, parts in self._prompts.items()
        }
        drafts: list[list[int]] = next(rest).tolist() if self._relays_drafts else [[]] * len(found)
        rows = tuple(
            RowResult(
                verdict.tokens,
                verdict.num_accepted,
                verdict.logprobs,
                prompts.get(i, ()),
                verdict.error,
                tuple(drafts[i][: row.wants_drafts]),
            )
            for i, (verdict, row) in enumerate(zip(found, self._plan.rows, strict=True))
        )
        times = self._times
        return StepResult(
            self._plan.plan_id,
            rows,
            device_ms=elapsed_ms(times.started, times.sampled),
            draft_ms=elapsed_ms(times.sampled, times.ended),
            load_ms=0.0 if times.loading is times.started else elapsed_ms(times.loading, times.started),
            idle_ms=0.0 if times.previous is None else elapsed_ms(times.previous, times.loading),
            captured=self._captured,
        )
