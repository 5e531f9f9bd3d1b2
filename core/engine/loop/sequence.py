"""A request on its way through the engine."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.contracts.kv_allocator import Lease
from engine.contracts.request import EngineRequest, Timings, TokenLogprobs
from engine.loop.block_keys import BlockKeys

if TYPE_CHECKING:
    from torch import Tensor


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """The host's knowledge of one request. Only the step loop changes it.

    Three counts of tokens move in order: ``computed`` (keys and values are in the cache, confirmed by a retired
    step), ``scheduled`` (the same, once all steps in flight have retired), and ``len(tokens) + pending`` (exist, or
    are being sampled).
    """

    request: EngineRequest
    arrival: int
    seed: int
    stop_ids: frozenset[int]
    max_total: int
    submitted_s: float
    tokens: list[int] = field(default_factory=list)
    keys: BlockKeys | None = None
    """Prefix-cache keys of ``tokens``; ``None`` when this request neither uses nor feeds the cache."""
    status: Status = Status.WAITING
    slot: int = -1
    lease: Lease | None = None
    blocks_sent: int = 0
    """Blocks of the lease that the device's block table already has."""
    scheduled: int = 0
    computed: int = 0
    pending: int = 0
    """Tokens being sampled by steps in flight."""
    drafts: tuple[int, ...] = ()
    draft_probs: Tensor | None = None
    proposed_at: int = -1
    """Length of ``tokens`` for which ``drafts`` were proposed; -1: not yet."""
    drafts_in_flight: bool = False
    drafter_follows: bool = True
    """A drafter on the device is told of all that this computes. If not, nothing is drafted for it."""
    epoch: int = 0
    """Counts preemptions: results of steps planned in an earlier epoch are dropped."""
    last_plan: int = -1
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    first_step_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    num_cached: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0
    num_rounds: int = 0
    """Steps that brought tokens after the first."""
    num_chains: int = 0
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
        """Something is left to compute, and nothing in flight decides what."""
        return self.scheduled < self.known < self.max_total and not self.drafts_in_flight

    @property
    def decodes(self) -> bool:
        """Only the last known token is left to compute."""
        known = len(self.tokens) + self.pending
        return self.scheduled == known - 1 and known > len(self.request.prompt)

    def timings(self, now_s: float) -> Timings:
        """Where the time went, up to ``now_s``."""
        first_step = self.first_step_s or now_s
        first_token = self.first_token_s or now_s
        last_token = self.last_token_s or now_s
        return Timings(
            queue_ms=(first_step - self.submitted_s) * 1e3,
            prefill_ms=(first_token - first_step) * 1e3,
            decode_ms=(last_token - first_token) * 1e3,
            cached_tokens=self.num_cached,
            drafted_tokens=self.num_drafted,
            accepted_tokens=self.num_accepted,
            preemptions=self.num_preemptions,
            rounds=self.num_rounds,
            draft_chains=self.num_chains,
            draft_ms=self.draft_ms,
        )
