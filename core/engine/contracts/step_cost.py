"""How long a step takes on the device, as a function of what it computes.

Schedulers, the heartbeat, planning and simulation all ask the same :class:`StepCost`. The engine fits it to its own
steps while it serves (see :mod:`engine.loop.step_cost`).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import astuple, dataclass
from math import sqrt

MOST_TOKENS = 1 << 30
"""More than any step has."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes, as the numbers that its time depends on. Add them up: ``decode(...) + chunk(...)``."""

    num_rows: int = 0
    num_tokens: int = 0
    """Of all rows, draft tokens included."""
    decode_context: int = 0
    """Tokens whose keys and values the rows that decode read, added up."""
    prefill_context: int = 0
    """For each prompt token, the tokens it attends to, added up."""
    num_drafts: int = 0
    """Of :attr:`num_tokens`: drafts that are verified."""

    @staticmethod
    def decode(context: int, num_tokens: int = 1) -> StepWork:
        """A row that decodes: its last token and the drafts verified with it attend to ``context`` tokens, themselves
        included."""
        return StepWork(1, num_tokens, context, 0, num_tokens - 1)

    @staticmethod
    def chunk(num_tokens: int, context: int = 0) -> StepWork:
        """A row that computes ``num_tokens`` prompt tokens after ``context`` tokens in the cache."""
        return StepWork(1, num_tokens, 0, num_tokens * context + num_tokens * (num_tokens + 1) // 2)

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(
            self.num_rows + other.num_rows,
            self.num_tokens + other.num_tokens,
            self.decode_context + other.decode_context,
            self.prefill_context + other.prefill_context,
            self.num_drafts + other.num_drafts,
        )

    def least(self, other: StepWork) -> StepWork:
        """The smaller of each number."""
        return StepWork(*map(min, astuple(self), astuple(other)))

    def most(self, other: StepWork) -> StepWork:
        """The larger of each number."""
        return StepWork(*map(max, astuple(self), astuple(other)))


NO_WORK = StepWork()


@dataclass(frozen=True, slots=True)
class Mixture:
    """Mixtures of experts of a model: how many of its weights a step reads depends on how many experts its tokens are
    routed to."""

    num_experts: int
    top_k: int
    share: float
    """Of the weights that a single token reads."""

    def experts(self, num_tokens: int) -> float:
        """How many experts so many tokens are routed to, if each goes to any ``top_k`` alike."""
        return self.num_experts * (1.0 - (1.0 - self.top_k / self.num_experts) ** num_tokens)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Milliseconds a step takes on the device: ``base_ms * weights(num_tokens)`` and so much for each row, token, and
    token of context. No coefficient is negative."""

    base_ms: float
    per_token_ms: float
    num_samples: int
    """Steps measured so far; 0 means the coefficients say nothing yet."""
    mixtures: tuple[Mixture, ...] = ()
    spread: float = 1.0
    """How far the experts of a step's tokens differ: 1 as chance has it, 0 not at all."""
    per_row_ms: float = 0.0
    """For each row: a row that decodes costs more than another token of a prompt."""
    per_decode_context_ms: float = 0.0
    """For each token of :attr:`StepWork.decode_context`."""
    per_prefill_context_ms: float = 0.0
    """For each token of :attr:`StepWork.prefill_context`."""
    gap_ms: float = 0.0
    """How long the device typically waits for the host before a step, while requests run. Not part of :meth:`ms`."""
    smallest: StepWork = NO_WORK
    largest: StepWork = NO_WORK
    """The least and the most of each number in any step measured."""
    per_draft_ms: float = 0.0
    """For each draft, in place of :attr:`per_token_ms`, if any step measured had drafts."""

    def ms(self, work: StepWork) -> float:
        draft_ms = self.per_draft_ms if self.largest.num_drafts else self.per_token_ms
        return (
            self.base_ms * self.weights(work.num_tokens)
            + self.per_row_ms * work.num_rows
            + self.per_token_ms * (work.num_tokens - work.num_drafts)
            + draft_ms * work.num_drafts
            + self.per_decode_context_ms * work.decode_context
            + self.per_prefill_context_ms * work.prefill_context
        )

    def extrapolates(self, work: StepWork) -> bool:
        """Whether ``work`` has less or more of something than any step measured: :meth:`ms` is then a guess."""
        low, high = self.smallest, self.largest
        return not (
            low.num_rows <= work.num_rows <= high.num_rows
            and low.num_tokens <= work.num_tokens <= high.num_tokens
            and low.decode_context <= work.decode_context <= high.decode_context
            and low.prefill_context <= work.prefill_context <= high.prefill_context
            and low.num_drafts <= work.num_drafts <= high.num_drafts
        )

    def weights(self, num_tokens: int) -> float:
        """What so many tokens read of the weights, in units of what one token reads: 1 without mixtures."""
        more = sum(each.share * (each.experts(num_tokens) / each.top_k - 1.0) for each in self.mixtures)
        return 1.0 + self.spread * more

    def tokens_within(self, budget_ms: float, beside: StepWork = NO_WORK, context: int = 0) -> int:
        """How many prompt tokens after ``context`` cached ones fit into a step with the work ``beside`` that takes at
        most ``budget_ms``, the gap before it included; at least 1."""
        if self.num_samples == 0:
            return MOST_TOKENS
        left = budget_ms - self.gap_ms - self.ms(beside) - self.per_row_ms
        if left <= 0.0:
            return 1
        # left = linear * n + quadratic * n^2, solved so that quadratic may be 0
        quadratic = self.per_prefill_context_ms / 2.0
        linear = self.per_token_ms + self.per_prefill_context_ms * (context + 0.5)
        divisor = linear + sqrt(linear * linear + 4.0 * quadratic * left)
        most = min(MOST_TOKENS, max(1, int(2.0 * left / divisor))) if divisor > 0.0 else MOST_TOKENS
        if not self.mixtures:
            return most
        in_time = budget_ms - self.gap_ms
        counts = range(1, most + 1)  # more tokens read more weights, so it may be fewer than that
        return max(1, bisect_right(counts, in_time, key=lambda n: self.ms(beside + StepWork.chunk(n, context))))


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Milliseconds a drafter takes for a step, beside :meth:`StepCost.ms`, and what becomes of its drafts."""

    base_ms: float = 0.0
    per_token_ms: float = 0.0
    """For each token of a step that a drafter on the device sees."""
    per_draft_ms: float = 0.0
    """For each draft of the longest chain that is asked for."""
    per_row_draft_ms: float = 0.0
    """For each draft of all chains."""
    num_samples: int = 0
    """Steps measured."""
    proposes: float = 1.0
    """Share of the requests asked about for which it had drafts."""
    acceptance: tuple[float, ...] = ()
    """By position in a chain: chance that a draft is accepted, given that those before it were."""

    def ms(self, num_tokens: int, longest: int, drafts: int) -> float:
        return (
            self.base_ms + self.per_token_ms * num_tokens + self.per_draft_ms * longest + self.per_row_draft_ms * drafts
        )
