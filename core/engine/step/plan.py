"""What the loop hands to the device for one step, and what comes back: plain data without tensors.

Token ids that the device just sampled or drafted never travel to the host and back: a step reads them from its rows'
token tables, and how far a row is computed is there, too. So a plan can be made before the tokens of the steps in
flight are known, nor how many drafts they accept: what a plan says of a row's position is then an upper bound.
"""

from __future__ import annotations

import msgspec

from engine.contracts.request import SamplingParams, TokenLogprobs


class BlockCopy(msgspec.Struct, frozen=True):
    """Keys and values of a block, in all caches of its KV group."""

    group: int
    source: int
    target: int


class RecordMove(msgspec.Struct, frozen=True):
    """Blocks of a KV group, and the slots of the memory store that hold their records, or will."""

    group: int
    blocks: tuple[int, ...]
    slots: tuple[int, ...]


class NewBlocks(msgspec.Struct, frozen=True):
    """Block ids to put into a row's block table of a KV group."""

    group: int
    start: int
    """Index of the first."""
    blocks: tuple[int, ...]


class Admit(msgspec.Struct, frozen=True):
    """A request takes a row of the device tables, or starts again in the one it has."""

    row_id: int
    tokens: tuple[int, ...]
    """All tokens known to the host: the prompt, after a preemption also the outputs so far."""
    num_computed: int
    """Of these, how many have keys and values in the blocks that the row is given."""
    prompt_len: int
    sampling: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    copies: tuple[BlockCopy, ...] = ()
    """A cached prefix ends inside of the block ``target``, in each KV group. Made in the order of a plan's admissions,
    before anything else of it writes keys and values. Empty where a prefix ends at a block's border."""


class StepRow(msgspec.Struct, frozen=True):
    """One request's part of a step: its next ``num_tokens`` known tokens, then ``num_drafts`` drafts."""

    row_id: int
    max_start: int
    """Position of the first token: exact, or what it is if all drafts in flight are accepted."""
    num_tokens: int
    samples: bool = True
    """All known tokens will have been computed: sample what comes next (and verify the drafts)."""
    num_drafts: int = 0
    """To be verified: those a drafter on the device left in the tables, or ``drafts``."""
    drafts: tuple[int, ...] = ()
    """By a drafter on the host."""
    tokens: tuple[int, ...] = ()
    """With pipeline stages: those of ``num_tokens`` that the device chose, for ranks that do not know them. The start
    is exact then."""
    new_blocks: tuple[NewBlocks, ...] = ()
    """At most one for each KV group."""
    wants_drafts: int = 0
    """How many tokens a drafter on the device is to propose after this step."""

    @property
    def num_queries(self) -> int:
        return self.num_tokens + self.num_drafts

    @property
    def max_end(self) -> int:
        """Bound of the keys this row attends to at its last query."""
        return self.max_start + self.num_tokens + self.num_drafts


class StepPlan(msgspec.Struct, frozen=True):
    """One step. Plans are executed strictly in the order of their ids."""

    plan_id: int
    admits: tuple[Admit, ...]
    rows: tuple[StepRow, ...]
    syncs_drafter: bool = True
    """A drafter on the device computes its keys for this step's tokens."""
    loads: tuple[RecordMove, ...] = ()
    """Records to fill into blocks, before anything else of it reads or writes keys and values."""

    @property
    def num_tokens(self) -> int:
        return sum(row.num_queries for row in self.rows)


class RowResult(msgspec.Struct, frozen=True):
    """What one row produced."""

    tokens: tuple[int, ...] = ()
    """Accepted drafts and one more; empty for a row that did not sample. Stops are the loop's business."""
    num_accepted: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """For the positions after the row's tokens that lie in the prompt."""
    error: str = ""
    """This row's own failure (for example logits that are not finite); the other rows are fine."""
    drafts: tuple[int, ...] = ()
    """With pipeline stages: what a drafter on the device proposed after ``tokens``."""


class StepResult(msgspec.Struct, frozen=True):
    """Results in the order of the plan's rows."""

    plan_id: int
    rows: tuple[RowResult, ...]
    device_ms: float
    """Forward, sample and verify, by the device's clock."""
    draft_ms: float = 0.0
    """In a drafter on the device, after this step."""
    load_ms: float = 0.0
    """Copying the plan's records into blocks, before this step."""
    idle_ms: float = 0.0
    """How long the device had nothing to do before that."""
    captured: bool = False
    """Replayed from a capture."""


class StepSkipped(RuntimeError):
    """An earlier step failed, so this one, planned on top of it, was not executed."""


class DeviceBroken(RuntimeError):
    """What is on the device is no longer known, or it does not work: only a new engine helps."""


class RankFailed(DeviceBroken):
    """One of several ranks has failed: which one, and where the others were. It has logged its own error."""


class DrafterBroken(RuntimeError):
    """A drafter on the device broke its contract: the text goes on from ``propose()``."""
