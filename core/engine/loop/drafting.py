"""How many drafts to ask for, and asking drafters on the host."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.contracts.drafter import Drafter, DraftRow, HostDrafter, cached_by, keeps_up, on_device
from engine.contracts.scheduler import StepCost
from engine.execution.step import StepPlan, StepResult
from engine.loop.sequence import Sequence
from engine.loop.width import WidthController

WORTH_KEEPING_UP = 8
"""Accepted drafts for which a request is never given up."""


class DrafterBroken(RuntimeError):
    """A drafter plugin raised or broke its contract."""


@dataclass(slots=True)
class Drafted:
    """What the drafts of a step came to."""

    tried: list[int] = field(default_factory=list)
    """By position in a chain: drafts all of whose predecessors stood."""
    stood: list[int] = field(default_factory=list)
    """Those that stood as well."""
    drafted: int = 0
    chains: int = 0

    @property
    def accepted(self) -> int:
        return sum(self.stood)

    def add(self, width: int, accepted: int) -> None:
        """A chain of ``width`` drafts, of which the first ``accepted`` stood."""
        self.drafted += width
        self.chains += 1
        for counts, upto in ((self.tried, min(width, accepted + 1)), (self.stood, accepted)):
            counts.extend([0] * (upto - len(counts)))
            for position in range(upto):
                counts[position] += 1


class Drafting:
    """Chooses each request's draft width and fetches host drafts for requests whose tokens are all known."""

    def __init__(self, drafter: Drafter, name: str, width: WidthController, vocab_size: int) -> None:
        self._host = drafter if isinstance(drafter, HostDrafter) and drafter.placement == "host" else None
        self._name = name
        self._width = width
        self._vocab_size = vocab_size
        kv = cached_by(drafter)
        self._keeps_keys = kv is not None and kv.num_layers > 0
        device = on_device(drafter)
        self._never_late = device is None or not keeps_up(device)
        self.enabled = drafter.max_width > 0
        self._asked = 0
        """The widest drafts that a drafter on the host was asked for since the last step was observed."""

    @property
    def max_width(self) -> int:
        return self._width.max_width

    @contextmanager
    def always(self, width: int) -> Iterator[None]:
        """See :meth:`engine.loop.core.EngineCore.drafting`."""
        kept, self._width = self._width, WidthController(min(width, self._width.max_width), adaptive=False)
        try:
            yield
        finally:
            self._width = kept

    def prepare(self, running: list[Sequence], cost: StepCost) -> dict[Sequence, int]:
        """Widths of the requests that decode; those on the host also get their drafts, if their tokens are known."""
        if not self.enabled:
            return {}
        decoding = [s for s in running if s.decodes]
        width = self._width.width(len(decoding), cost) if decoding else 0
        if width == 0 or not any(s.drafter_follows for s in decoding):
            widths = dict.fromkeys(decoding, 0)
            if any(s.drafts for s in decoding):
                self._width.dropped()
        else:
            # Of those given up, too: they wait for the others' tokens, for the batch to stay together.
            widths = {s: _at_most(width, s.max_total - s.known) for s in decoding}
        if self._host is not None:
            settled = [s for s in decoding if s.pending == 0 and s.proposed_at != len(s.tokens)]
            self._propose(self._host, settled, widths, len(decoding))
        return widths

    def ahead(self, sampling: Collection[Sequence], widths: dict[Sequence, int], cost: StepCost) -> dict[Sequence, int]:
        """How many drafts a drafter on the device shall propose behind the step that is being planned, in which these
        get their next tokens; those whose prompts end with it are not among ``widths``."""
        if not self.enabled or self._host is not None:
            return {}
        joining = sum(s not in widths for s in sampling)
        if not joining and not any(widths.values()):
            return {}
        probes = self._width.probes(len(widths))
        width = self._width.width(len(widths) + joining, cost) if joining else max(widths.values())
        wanted: dict[Sequence, int] = {}
        for s in sampling:
            if not s.drafter_follows or (probes and s.drafts):  # drafts of a probe: these will tell
                continue
            # Of what remains, that step takes one token at least, and the last one is the target's own.
            wanted[s] = _at_most(width, s.max_total - s.known - 1)
        if any(wanted.values()):
            self._width.asked_for(len(widths) + joining)
        return wanted

    def must_keep_up(self, sequences: Collection[Sequence]) -> bool:
        """Whether the drafter is to be told of a step in which these decode, and nothing else happens. If not, no more
        can be drafted for them."""
        if not self._keeps_keys:
            return True
        following = [s for s in sequences if s.drafter_follows]
        return bool(following) and (
            not self._width.rests(len(sequences)) or any(s.num_accepted >= WORTH_KEEPING_UP for s in following)
        )

    def observe(self, plan: StepPlan, drafted: Drafted, result: StepResult, gap_ms: float | None) -> None:
        """What a step came to: its drafts, its times, and how long the device had waited before it, for a drafter on
        the host among others (``None``: nobody waited, no request was running)."""
        if not self.enabled:
            return
        if not plan.drafter_follows:  # one token for each row, and no cost of drafting
            self._width.observe(len(plan.rows), 0, 0, 0)
            if gap_ms is not None:
                self._width.observe_step(len(plan.rows), len(plan.rows), result.device_ms)
            return
        decoding = sum(row.num_tokens == 1 and row.samples for row in plan.rows)
        if decoding:
            self._width.observe(decoding, drafted.chains, drafted.drafted, drafted.accepted)
        width = self._asked if self._host is not None else max(row.wants_drafts for row in plan.rows)
        self._asked = 0
        # Keeping up with a prompt is not a cost of decoding.
        if decoding != len(plan.rows) or gap_ms is None:
            return
        num_tokens = plan.num_tokens
        self._width.observe_step(decoding, num_tokens, result.device_ms)
        if self._host is None and width == 0 and num_tokens == decoding:
            self._width.observe_keeping_up(
                decoding, result.device_ms, result.draft_ms, result.late_ms, result.late_steps
            )
        for _ in range(result.late_steps):
            self._width.observe_cost(decoding, 0, result.late_ms / result.late_steps)
        # Others may be told of a step without drafts later.
        if self._never_late or width > 0 or result.draft_ms > 0.0:
            self._width.observe_cost(decoding, width, gap_ms + result.draft_ms)

    def _propose(
        self, drafter: HostDrafter, sequences: list[Sequence], widths: dict[Sequence, int], batch_size: int
    ) -> None:
        asked = [s for s in sequences if widths[s] > 0]
        for sequence in sequences:
            sequence.drafts, sequence.proposed_at = (), len(sequence.tokens)
        if not asked:
            return
        rows = [DraftRow(s.slot, s.tokens, s.prompt_len, widths[s], s.request.cache_salt) for s in asked]
        try:
            draft = drafter.propose(rows)
        except Exception as error:
            raise DrafterBroken(f"drafter={self._name} raised {type(error).__name__}: {error}") from error
        if len(draft.tokens) != len(rows):
            raise DrafterBroken(f"drafter={self._name} answered {len(draft.tokens)} rows, expected {len(rows)}")
        for i, (sequence, row, tokens) in enumerate(zip(asked, rows, draft.tokens, strict=True)):
            self.check(tokens, row.width)
            sequence.drafts = tuple(tokens)
            sequence.draft_probs = None if draft.probs is None else draft.probs[i, : len(tokens)]
        self._asked = max(self._asked, max(row.width for row in rows))
        self._width.observe_answers(batch_size, len(rows), sum(bool(s.drafts) for s in asked))

    def check(self, tokens: tuple[int, ...], width: int) -> None:
        """Raise :class:`DrafterBroken` unless these are at most ``width`` token ids of the vocabulary."""
        if len(tokens) > width:
            raise DrafterBroken(f"drafter={self._name} proposed {len(tokens)} tokens, at most {width} were wanted")
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                raise DrafterBroken(
                    f"drafter={self._name} proposed token {token}, expected 0 to {self._vocab_size - 1}"
                )


def _at_most(width: int, remaining: int) -> int:
    """Drafts for a request that may produce ``remaining`` more tokens: the last of these is always the target's own."""
    return max(0, min(width, remaining - 1))
