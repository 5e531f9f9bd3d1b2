"""Asking a host drafter what might come next, and how much of it to ask for."""

from __future__ import annotations

import time

from engine.contracts.drafter import Drafter, DraftRow
from engine.contracts.scheduler import StepCost
from engine.loop.sequence import Sequence
from engine.loop.width import WidthController


class DrafterBroken(RuntimeError):
    """A drafter plugin raised or broke its contract."""


class Drafting:
    """Chooses each request's draft width and fetches host drafts for requests whose tokens are all known."""

    def __init__(self, drafter: Drafter, name: str, width: WidthController, vocab_size: int) -> None:
        self._drafter = drafter
        self._name = name
        self._width = width
        self._vocab_size = vocab_size
        self.on_host = drafter.placement == "host"
        self.enabled = drafter.max_width > 0
        self._draft_ms = 0.0

    def prepare(self, running: list[Sequence], cost: StepCost) -> dict[Sequence, int]:
        """Widths of the requests that decode; those on the host also get their drafts, if their tokens are known."""
        if not self.enabled:
            return {}
        decoding = [s for s in running if s.decodes]
        widths = {s: self._width.width(len(decoding), cost, s.max_total - s.known) for s in decoding}
        if self.on_host:
            self._propose([s for s in decoding if s.pending == 0 and s.proposed_at != len(s.tokens)], widths)
        return widths

    def observe(self, batch_size: int, drafted: int, accepted: int, draft_ms: float) -> None:
        """What a step with drafts in it came to."""
        self._width.observe(batch_size, drafted, accepted, draft_ms + self._draft_ms)
        self._draft_ms = 0.0

    def _propose(self, sequences: list[Sequence], widths: dict[Sequence, int]) -> None:
        asked = [s for s in sequences if widths[s] > 0]
        for sequence in sequences:
            sequence.drafts, sequence.proposed_at = (), len(sequence.tokens)
        if not asked:
            return
        started = time.perf_counter()
        rows = [DraftRow(s.slot, s.tokens, s.prompt_len, widths[s]) for s in asked]
        try:
            draft = self._drafter.propose(rows)
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
