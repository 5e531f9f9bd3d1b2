"""What the loop hands to the device for one step, and what comes back. Immutable on purpose.

Token ids that the device just sampled never travel to the host and back: a row names positions of its slot's token
table, and the table is written by whoever knows the token first (the host for prompts and drafts, the sampler for
outputs). So a plan can be made before the previous step's tokens are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.contracts.request import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Admit:
    """A request takes a slot (a row of the device tables)."""

    slot: int
    tokens: tuple[int, ...]
    """All tokens known to the host: the prompt, after a preemption also the outputs so far."""
    prompt_len: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepRow:
    """One request's part of a step: positions ``start .. start + num_tokens - 1``, then the drafts."""

    slot: int
    start: int
    num_tokens: int
    drafts: tuple[int, ...]
    samples: bool
    """All known tokens will have been computed: sample what comes next (and verify the drafts)."""
    output_index: int
    """0-based position in the output of the first token sampled here."""
    block_start: int
    new_blocks: tuple[int, ...]
    """Block ids to put into the slot's block table from index ``block_start`` on."""
    draft_probs: Tensor | None = None
    """``[len(drafts), vocab]``: what the drafts were sampled from, if the drafter samples."""
    wants_drafts: int = 0
    """For drafters on the device: how many tokens to propose after this row was verified."""

    @property
    def num_queries(self) -> int:
        return self.num_tokens + len(self.drafts)

    @property
    def end(self) -> int:
        """Keys this row attends to at its last query."""
        return self.start + self.num_tokens + len(self.drafts)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Plans are executed strictly in the order of their ids."""

    plan_id: int
    admits: tuple[Admit, ...]
    rows: tuple[StepRow, ...]
    drafter_follows: bool = True
    """A drafter on the device is told of this step."""

    @property
    def num_tokens(self) -> int:
        return sum(row.num_queries for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowResult:
    """What one row produced."""

    tokens: tuple[int, ...] = ()
    """Accepted drafts and one more; empty for a row that did not sample. Stops are the loop's business."""
    num_accepted: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """For positions ``start + 1 ..`` that lie in the prompt."""
    drafts: tuple[int, ...] = ()
    """Proposals of a drafter on the device for the next step."""
    draft_probs: Tensor | None = None
    error: str = ""
    """This row's own failure (for example logits that are not finite); the other rows are fine."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in the order of the plan's rows."""

    plan_id: int
    rows: tuple[RowResult, ...]
    device_ms: float
    """Forward, sample and verify, by the device's clock."""
    draft_ms: float = 0.0
    """Time in a device drafter behind this step."""
    idle_ms: float = 0.0
    """How long the device had nothing to do before this step."""
    late_ms: float = 0.0
    """Time in a device drafter, before this step, for ``late_steps`` earlier ones that nobody drafted behind."""
    late_steps: int = 0
    recorded: bool = False
    """Calls were recorded on the way, so that these times say nothing of later steps."""


class StepSkipped(RuntimeError):
    """An earlier step failed, so this one, planned on top of it, was not executed."""


class DeviceBroken(RuntimeError):
    """What is on the device is no longer known, or it does not work: only a new engine helps."""
