"""A request on its way through the engine."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from engine.contracts.kv_allocator import Lease
from engine.contracts.request import EngineRequest, StagedTokens, Timings, TokenLogprobs
from engine.kv.block_keys import BlockKeys
from engine.loop.filling import Fill
from engine.loop.forcing import Forcing
from engine.loop.staging import Read
from engine.step.plan import Admit, BlockCopy, NewBlocks, RowResult, StepRow

NOTHING: Mapping[str, int] = {}


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """The host's knowledge of one request. The step loop changes it through the methods alone.

    Three counts of tokens, ``computed <= scheduled <= known``: those that have keys and values, confirmed by a retired
    step; the same once all steps in flight have retired; and those that exist or are being sampled. The last two are
    upper bounds: each step in flight is counted as if all its drafts were accepted.
    """

    request: EngineRequest
    arrival: int
    seed: int
    stop_ids: frozenset[int]
    max_total: int
    submitted_s: float
    tokens: list[int] = field(default_factory=list)
    """Known to the host."""
    keys: BlockKeys | None = None
    """Prefix-cache keys of ``tokens``; ``None`` when this request neither uses nor feeds the cache."""
    status: Status = Status.WAITING
    row_id: int = -1
    lease: Lease | None = None
    copies: tuple[BlockCopy, ...] = ()
    """For the device to make: the block of each KV group in which a prefix hit ends. Empty once a plan has them."""
    fill: Fill | None = None
    """Records of its prefix, until plans have all of them: it is not computed before."""
    read: Read | None = None
    """Records that are on their way while it waits."""
    num_resets: int = 0
    """How often everything cached had been forgotten when it was admitted."""
    looked: bool = False
    """Records were looked for since it began to wait."""
    compute_ms: float = 0.0
    """What computing it was expected to take then, as far as that is measured."""
    loaded: dict[str, int] = field(default_factory=dict)
    """Tokens of its prefix that were found in records and not in blocks, at its last admission, by store."""
    staged: StagedTokens | None = None
    """What became of the first records that it waited for."""
    blocks_sent: list[int] = field(default_factory=list)
    """By KV group: blocks of the lease that the device's block table already has."""
    is_on_device: bool = False
    """The device tables hold this sequence's state, up to the steps in flight."""
    tokens_sent: int = 0
    """Tokens that the device was told with the admission."""
    computed: int = 0
    scheduled: int = 0
    pending: int = 0
    """Bound of the tokens that steps in flight sample."""
    host_drafts: tuple[int, ...] = ()
    """For the next step: by a drafter on the host, or relayed by one on the device."""
    device_drafts: int = 0
    """How many drafts a drafter on the device will have left for the next step."""
    start_tag: int = 0
    """Its start tag, see :class:`engine.loop.fair_queue.FairQueue`."""
    due_s: float = 0.0
    """When its first token is due, see :mod:`engine.loop.due_times`; 0: there is no target."""
    drafter_synced: bool = True
    """A drafter on the device has seen all its tokens: its keys are there, and drafts may be good."""
    forcing: Forcing | None = None
    """What its grammar forces, once it was asked."""
    proposed_at: int = -1
    """Length of ``tokens`` for which a drafter on the host was asked last."""
    epoch: int = 0
    """Counts preemptions and roll-backs: results of steps planned in an earlier epoch are dropped."""
    last_plan: int = -1
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    preempted_s: float = 0.0
    """The last time, if ever."""
    first_step_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    num_cached: int = 0
    num_loaded: dict[str, int] = field(default_factory=dict)
    num_retained: int = 0
    """Tokens of its prompt that stay in the prefix cache longer than others."""
    num_drafted: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0
    num_decode_steps: int = 0
    """Steps that brought tokens after the first."""
    num_draft_chains: int = 0
    """Those of them with drafts."""
    draft_ms: float = 0.0
    """Time in the drafter since the first token."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def num_outputs(self) -> int:
        """Output tokens known to the host."""
        return len(self.tokens) - self.prompt_len

    @property
    def known(self) -> int:
        return len(self.tokens) + self.pending

    @property
    def can_run(self) -> bool:
        """Something is left to compute, whatever the steps in flight bring."""
        # A prompt that fills the context can be scored, which computes its last token, too.
        return self.scheduled < self.known < max(self.max_total, self.prompt_len + 1)

    @property
    def decodes(self) -> bool:
        """Only the last known token is left to compute."""
        known = len(self.tokens) + self.pending
        return self.scheduled == known - 1 and known > len(self.request.prompt)

    @property
    def max_drafts(self) -> int:
        """Drafts that may be verified with its last known token: the last token of all is the target's own."""
        return max(0, self.max_total - self.known - 1)

    # Changes, in the order of a life ------------------------------------------------------------------------------

    def admit(
        self,
        row_id: int,
        lease: Lease,
        copies: tuple[BlockCopy, ...] = (),
        fill: Fill | None = None,
        loaded: Mapping[str, int] = NOTHING,
    ) -> None:
        """Take a row and blocks, of which the first may hold a cached prefix, the last of it once ``copies`` are
        made, and ``loaded`` tokens of it, by store, once ``fill`` is."""
        self.row_id, self.lease, self.copies = row_id, lease, copies
        self.fill, self.loaded = fill, dict(loaded)
        self.drafter_synced = True
        self.scheduled = self.computed = lease.num_cached

    def admission(self) -> Admit:
        """Everything the device must know of it, from now on at its row.

        Copies are made once, even by a plan that is skipped: where it is admitted again in its row, the blocks they
        were made from may hold something else.
        """
        assert self.lease is not None
        self.is_on_device, self.blocks_sent = True, [0] * len(self.lease.blocks)
        self.tokens_sent = len(self.tokens)
        copies, self.copies = self.copies, ()
        return Admit(
            row_id=self.row_id,
            tokens=tuple(self.tokens),
            num_computed=self.computed,
            prompt_len=self.prompt_len,
            sampling=self.request.sampling,
            seed=self.seed,
            stop_ids=tuple(self.stop_ids),
            copies=copies,
        )

    def schedule(
        self,
        plan_id: int,
        num_tokens: int,
        num_drafts: int,
        wants_drafts: int,
        syncs_drafter: bool = True,
        relays: bool = False,
    ) -> StepRow:
        """Its part of a step; from here on these tokens count as scheduled. ``relays``: with the tokens that the device
        chose."""
        assert self.lease is not None and self.is_on_device
        end = self.scheduled + num_tokens
        row = StepRow(
            row_id=self.row_id,
            max_start=self.scheduled,
            num_tokens=num_tokens,
            samples=end == self.known,
            num_drafts=num_drafts,
            drafts=self.host_drafts[:num_drafts],
            tokens=tuple(self.tokens[self.scheduled : end]) if relays and end > self.tokens_sent else (),
            new_blocks=self._new_blocks(self.lease),
            wants_drafts=wants_drafts,
        )
        self.last_plan = plan_id
        self.scheduled += row.num_queries
        self.pending += row.samples + num_drafts
        self.host_drafts, self.device_drafts = (), wants_drafts
        self.drafter_synced &= syncs_drafter
        self._check()
        return row

    def _new_blocks(self, lease: Lease) -> tuple[NewBlocks, ...]:
        """What the device's block tables lack."""
        sent, found = self.blocks_sent, []
        for group, blocks in enumerate(lease.blocks):
            if len(blocks) > sent[group]:
                found.append(NewBlocks(group, sent[group], tuple(blocks[sent[group] :])))
                sent[group] = len(blocks)
        return tuple(found)

    def commit(self, row: StepRow, result: RowResult, taken: int) -> None:
        """A step has retired; ``taken`` of its tokens count, fewer than it brought only at the end of the output."""
        missed = row.num_drafts + row.samples - taken
        self.computed += row.num_tokens + min(result.num_accepted, taken)
        self.scheduled = max(self.computed, self.scheduled - missed)
        self.pending -= row.samples + row.num_drafts
        self.tokens.extend(result.tokens[:taken])
        if result.drafts:
            self.host_drafts, self.device_drafts = result.drafts, len(result.drafts)
        self._check()

    def roll_back(self) -> None:
        """Steps in flight have failed: go on from what is confirmed, on a row that is admitted again."""
        self.scheduled, self.pending = self.computed, 0
        self._forget_device()

    def reset(self) -> None:
        """Preempted, and row and blocks are given back: everything is computed again."""
        self.num_preemptions += 1
        self.looked = False
        self.prompt_logprobs.clear()
        self._forget_device()

    def leave(self) -> tuple[int, Lease | None]:
        """Row and blocks, which are not its own any more."""
        row_id, lease = self.row_id, self.lease
        self.row_id, self.lease, self.copies = -1, None, ()
        self.scheduled = self.computed = self.pending = 0
        return row_id, lease

    def propose(self, drafts: SequenceOf[int]) -> None:
        """What a drafter on the host said to the tokens so far."""
        self.host_drafts, self.proposed_at = tuple(drafts), len(self.tokens)

    def _forget_device(self) -> None:
        self.epoch += 1
        self.is_on_device = False
        self.host_drafts, self.proposed_at, self.device_drafts = (), -1, 0

    def _check(self) -> None:
        assert 0 <= self.computed <= self.scheduled <= self.known, (self.computed, self.scheduled, self.known)

    def timings(self, now_s: float) -> Timings:
        """Where the time went, up to ``now_s``."""
        first_step = self.first_step_s or now_s
        first_token = self.first_token_s or now_s
        last_token = self.last_token_s or now_s
        return Timings(
            submitted_s=self.submitted_s,
            queue_ms=(first_step - self.submitted_s) * 1e3,
            prefill_ms=(first_token - first_step) * 1e3,
            decode_ms=(last_token - first_token) * 1e3,
            cached_tokens=self.num_cached,
            loaded=self.num_loaded,
            staged=self.staged,
            retained_tokens=self.num_retained,
            drafted_tokens=self.num_drafted,
            accepted_tokens=self.num_accepted,
            preemptions=self.num_preemptions,
            decode_steps=self.num_decode_steps,
            draft_chains=self.num_draft_chains,
            draft_ms=self.draft_ms,
        )
