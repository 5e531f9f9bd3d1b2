"""The text of one output as it grows: detokenized, and ended by a stop string, after ``min_tokens``. The server
and ``LLM`` alike."""

from __future__ import annotations

from collections.abc import Sequence

from engine.service.stops import StopMatcher
from engine.service.tokenizer import Tokenizer


class OutputText:
    """Feed it every output token but the stop token, in order, until :attr:`stopped`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: tuple[str, ...] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """``stops``: the text ends before the first of these, or after it (``include_stop``), unless it is complete
        within the first ``min_tokens`` tokens. One that spells a special token ends the text also where such tokens
        are not shown."""
        spelled = tuple(stop for stop in stops if skip_special_tokens and tokenizer.spells_special(stop))
        self.detokenized = 0
        """Characters of the text of all tokens so far."""
        self.shown = 0
        """Characters of the text that was returned so far."""
        self.stop: str | None = None
        """The stop string that ended the text, if one did."""
        self._detokenizer = tokenizer.stream(skip_special_tokens, prompt)
        self._names = tokenizer.token_bytes
        self._hidden = tokenizer.hidden if spelled else frozenset()
        self._stops = StopMatcher(stops, include_stop, spelled) if stops else None
        self._tokens_before_stop = min_tokens

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    def feed(self, token: int) -> str:
        """The text that becomes visible with this token."""
        self._tokens_before_stop -= 1
        if token in self._hidden:
            return self._show(self._names[token].decode(errors="replace"), hidden=True)
        return self._show(self._detokenizer.feed(token))

    def finish(self) -> str:
        """The rest of the text, at the end of an output that no stop string ended."""
        text = self._show(self._detokenizer.flush())
        if self._stops is None or self.stopped:
            return text
        rest = self._stops.flush()
        self.shown += len(rest)
        return text + rest

    def _show(self, text: str, hidden: bool = False) -> str:
        if not hidden:
            self.detokenized += len(text)
        if self._stops is not None:
            released = self._stops.feed(text, hidden, self._tokens_before_stop < 0)
            text, self.stop = released.text, released.stop
        self.shown += len(text)
        return text
