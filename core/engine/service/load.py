"""What was sent to an engine and has not ended: counted where it is sent, so that it is never late."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Load:
    """Of one engine. All are 0 once everything that was sent there has ended, however it ended."""

    sequences: int = 0
    queued_tokens: int = 0
    """Prompt tokens of sequences that have no token yet, without those that were expected to be cached."""
    running_tokens: int = 0
    """Prompt and output tokens of those that have one."""


class Share:
    """One sequence's part of a :class:`Load`. Always :meth:`end` it."""

    def __init__(self, load: Load, prompt_tokens: int, cached_tokens: int) -> None:
        self._load = load
        self._prompt = prompt_tokens
        self._queued = max(0, prompt_tokens - cached_tokens)
        self._running = 0
        self._ended = False
        load.sequences += 1
        load.queued_tokens += self._queued
        self.waiting_tokens = load.queued_tokens
        """Of the engine when this was sent there, with its own."""

    def took(self, tokens: int) -> None:
        """The engine has answered with so many tokens."""
        if self._ended:
            return
        load = self._load
        if not self._running and tokens:
            load.queued_tokens -= self._queued
            self._queued, tokens = 0, self._prompt + tokens
        self._running += tokens
        load.running_tokens += tokens

    def end(self) -> None:
        """Nothing of it is left there. Idempotent."""
        if self._ended:
            return
        self._ended = True
        self._load.sequences -= 1
        self._load.queued_tokens -= self._queued
        self._load.running_tokens -= self._running
