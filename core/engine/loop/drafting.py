"""How many drafts to ask for, and asking drafters on the host."""

from __future__ import annotations

import time

from engine.contracts.drafter import Drafter, DraftRow, HostDrafter
from engine.contracts.scheduler import StepCost
from engine.loop.sequence import Sequence
from engine.loop.width import WidthController


class DrafterBroken(RuntimeError):
    """A drafter plugin raised or broke its contract."""


class Drafting:
    """Chooses each request's draft width and fetches host drafts for requests whose tokens are all known."""

    def __init__(self, drafter: Drafter, name: str, width: WidthController, vocab_size: int) -> None:
        self._host = drafter if isinstance(drafter, HostDrafter) and drafter.placement == "host" else None
        self._name = name
        self._width = width
        self._vocab_size = vocab_size
        self.enabled = drafter.max_width > 0
        self._draft_ms = 0.0

    def prepare(self, running: list[Sequence], cost: StepCost) -> dict[Sequence, int]:
        """Widths of the requests that decode; those on the host also get their drafts, if their tokens are known."""
        if not self.enabled:
            return {}
        decoding = [s for s in running if s.decodes]
        widths = {s: self._width.width(len(decoding), cost, s.max_total - s.known) for s in decoding}
        if self._host is not None:
            self._propose(self._host, [s for s in decoding if s.pending == 0 and s.proposed_at != len(s.tokens)], widths)
        return widths

    def ahead(self, sequence: Sequence, widths: dict[Sequence, int], cost: StepCost) -> int:
        """How many drafts a drafter on the device shall propose behind the step that is being planned, in which
        ``sequence`` gets its next token."""
        if not self.enabled or self._host is not None:
            return 0
        # Of what remains, that step takes one token at least, and the last one is the target's own.
        remaining = sequence.max_total - sequence.known - 1
        if sequence in widths:
            return max(0, min(widths[sequence], remaining - 1))
        return self._width.width(len(widths) + 1, cost, remaining)

    def observe(self, batch_size: int, drafted: int, accepted: int, draft_ms: float) -> None:
        """What a step with drafts in it came to."""
        self._width.observe(batch_size, drafted, accepted, draft_ms + self._draft_ms)
        self._draft_ms = 0.0

    def _propose(self, drafter: HostDrafter, sequences: list[Sequence], widths: dict[Sequence, int]) -> None:
        asked = [s for s in sequences if widths[s] > 0]
        for sequence in sequences:
            sequence.drafts, sequence.proposed_at = (), len(sequence.tokens)
        if not asked:
            return
        started = time.perf_counter()
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
        self._draft_ms += (time.perf_counter() - started) * 1e3

    def check(self, tokens: tuple[int, ...], width: int) -> None:
        """Raise :class:`DrafterBroken` unless these are at most ``width`` token ids of the vocabulary."""
        if len(tokens) > width:
            raise DrafterBroken(f"drafter={self._name} proposed {len(tokens)} tokens, at most {width} were wanted")
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                raise DrafterBroken(
                    f"drafter={self._name} proposed token {token}, expected 0 to {self._vocab_size - 1}"
                )
