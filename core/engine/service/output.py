"""One output sequence as it grows: its text, what ends it, its tokens and their log-probabilities. The server and
``LLM`` alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from engine.contracts.request import FinishReason, TokenLogprobs, TokensOut
from engine.service.output_text import OutputText
from engine.service.parts import CallText, Part, PartParser, Reasoning, Text, merged
from engine.service.text_runs import TextRuns

PromptLogprobs = tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token whose text is visible. ``offset``: characters of output text before it."""

    token: int
    offset: int
    logprobs: TokenLogprobs | None
    run: int | None = 0
    """Which of the output's texts for the reader it is of; ``None``: of a thought, or of a call."""


class Delta(msgspec.Struct, frozen=True):
    """New visible output of choice ``index``; the last one has ``finish_reason``."""

    index: int
    parts: tuple[Part, ...] = ()
    tokens: tuple[ShownToken, ...] = ()
    """Tokens whose text is out; filled when logprobs were asked for."""
    token_ids: tuple[int, ...] = ()
    """Every output token since the delta before, visible or not."""
    prompt_logprobs: PromptLogprobs = ()
    """The prompt's, in the first delta; else empty."""
    finish_reason: FinishReason | None = None
    stop: str | None = None
    """With ``finish_reason``: the stop string that ended the output, if one did."""

    @property
    def text(self) -> str:
        """What a reader sees: the text parts, without reasoning and tool calls."""
        return "".join([part.text for part in self.parts if isinstance(part, Text)])

    @property
    def thought(self) -> str:
        return "".join([part.text for part in self.parts if isinstance(part, Reasoning)])

    @property
    def calls(self) -> list[CallText]:
        """Of tools."""
        return [part for part in self.parts if isinstance(part, CallText)]

    @property
    def answers(self) -> bool:
        """Whether there is something else than thoughts."""
        return any(not isinstance(part, Reasoning) for part in self.parts)


def joined(deltas: Sequence[Delta]) -> Delta:
    """All deltas of a choice as one."""
    return Delta(
        deltas[-1].index,
        merged([part for delta in deltas for part in delta.parts]),
        tuple([token for delta in deltas for token in delta.tokens]),
        tuple([token for delta in deltas for token in delta.token_ids]),
        deltas[0].prompt_logprobs,
        deltas[-1].finish_reason,
        deltas[-1].stop,
    )


class Output:
    """Turns what the engine says of one sequence into deltas."""

    def __init__(
        self,
        text: OutputText,
        on_stop: Callable[[], None],
        *,
        index: int = 0,
        wants_logprobs: bool = False,
        parser: PartParser | None = None,
    ) -> None:
        """``on_stop`` ends the sequence in the engine; called when the text meets a stop string. ``parser`` finds the
        parts of the text; ``None``: all of it is for the reader."""
        self.tokens: list[int] = []
        """Every counted output token, the one that ended the output included."""
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: PromptLogprobs = ()
        self.finish_reason: FinishReason | None = None
        """``stop`` or ``length``, once the output has ended well."""
        self.stop_token: int | None = None
        self.failure = ""
        """Why the output ended otherwise; empty if it did not."""
        self.reasoning_tokens = 0
        """Of :attr:`tokens`, those of what the model thought, and the one that began it."""
        self._text = text
        self._on_stop = on_stop
        self._index = index
        self._wants_logprobs = wants_logprobs
        self._parser = parser
        self._runs = TextRuns() if wants_logprobs and parser is not None else None
        self._pending: list[tuple[ShownToken, int]] = []
        self._given: int | None = None
        """Tokens that deltas had so far; ``None`` before the first delta."""

    def take(self, out: TokensOut) -> Delta | None:
        """The new visible output, ``None`` if there is none. The delta of the end is none when :attr:`failure` is
        set."""
        if out.prompt_logprobs:
            self.prompt_logprobs = out.prompt_logprobs
        parts = [] if self._text.stopped else self._feed(out)
        if out.finish_reason is not None:
            rest = self._end(out)
            last = [*self._parts(rest), *(self._parser.finish() if self._parser is not None else ())]
            if self._runs is not None:
                self._runs.add(rest, last, is_reasoning=False)
            parts += last
            return None if self.failure else self._delta(merged(parts), self._release())
        shown = self._release()
        return self._delta(merged(parts), shown) if parts or shown else None

    def _parts(self, text: str) -> Sequence[Part]:
        if not text:
            return ()
        return (Text(text),) if self._parser is None else self._parser.feed(text)

    def _feed(self, out: TokensOut) -> list[Part]:
        """Count the new tokens; returns the parts that they make visible."""
        parts: list[Part] = []
        for i, token in enumerate(out.tokens):
            self.tokens.append(token)
            logprobs = out.logprobs[i] if i < len(out.logprobs) else None
            if logprobs is not None:
                self.logprobs.append(logprobs)
            if token == out.stop_token and i == len(out.tokens) - 1:
                self.stop_token = token
                break
            text = self._show(token, logprobs)
            new = self._parts(text)
            if self._runs is not None and self._parser is not None:
                self._runs.add(text, new, self._parser.is_reasoning)
            parts += new
            if self._parser is not None and self._parser.is_reasoning:
                self.reasoning_tokens = len(self.tokens)
            if self._text.stopped:
                # Later tokens of the same step never happened, as far as the client can tell.
                if out.finish_reason is None:
                    self._on_stop()
                break
        return parts

    def _show(self, token: int, logprobs: TokenLogprobs | None) -> str:
        offset = self._text.detokenized
        piece = self._text.feed(token)
        end = self._text.detokenized
        # A token without visible text that completes a stop string has no part in the output, unless the string has.
        if self._wants_logprobs and (not self._text.stopped or end > offset or self._text.shown > end):
            self._pending.append((ShownToken(token, offset, logprobs), end))
        return piece

    def _release(self) -> tuple[ShownToken, ...]:
        """Pending tokens whose text is out, and part of something: after a stop, those that contributed at least a
        character of it."""
        if not self._pending:
            return ()
        released: list[ShownToken] = []
        shown, runs, has_ended = self._text.shown, self._runs, self.finish_reason is not None
        for token, end in self._pending:
            if end > shown and not (self._text.stopped and token.offset < shown):
                break
            if runs is None:
                released.append(token)
                continue
            if not has_ended and not runs.is_certain(token.offset, end):
                break
            released.append(replace(token, run=runs.run_of(token.offset, end)))
        del self._pending[: len(released)]
        return tuple(released)

    def _end(self, out: TokensOut) -> str:
        """Note how it ended; returns the rest of the text."""
        reason = "stop" if self._text.stopped else out.finish_reason
        if reason not in ("stop", "length"):
            self.failure = out.error or "the sequence was aborted"
            return ""
        text = "" if self._text.stopped else self._text.finish()
        self.finish_reason = "stop" if self._text.stopped else reason
        return text

    def _delta(self, parts: tuple[Part, ...], shown: tuple[ShownToken, ...]) -> Delta:
        prompt_logprobs = self.prompt_logprobs if self._given is None else ()
        ids = tuple(self.tokens[self._given or 0 :])
        self._given = len(self.tokens)
        stop = self._text.stop if self.finish_reason else None
        return Delta(self._index, parts, shown, ids, prompt_logprobs, self.finish_reason, stop)
