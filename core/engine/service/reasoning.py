"""What a model thinks before it answers: where it stands in an output, and how a request limits it.

A model thinks between two texts that its chat template taught it, so the template's own text tells which. A prompt may
end within a thought that the template has opened, after one that it has closed at once, or neither; then an output that
begins with the first text thinks. What a thought is called on the wire, each format of ``engine.http`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from engine.contracts.constraint import Grammar
from engine.contracts.request import ReasoningTokens
from engine.service.channels import ChannelParser, header_within
from engine.service.errors import bad_request
from engine.service.parts import HoldingParser, Part, PartParser, Reasoning, Text, overlap
from engine.service.protocol import ChatOptions, GenerationRequest
from engine.service.tokenizer import Tokenizer

Place = Literal["before", "within", "after"]
"""Where an output stands: it may begin to think, thinks, or answers."""
TAIL_TOKENS = 16
"""The last tokens of a prompt tell its place."""


@dataclass(frozen=True, slots=True)
class ReasoningSyntax:
    """Texts around a thought."""

    opens: str
    closes: str
    token: str = ""
    """What of ``opens`` is a token of the model, if not all."""
    channels: bool = False
    """Thoughts are messages of an output, as :mod:`engine.service.channels` finds them; ``opens`` and ``closes`` are
    those of all messages."""

    @property
    def opening_token(self) -> str:
        return self.token or self.opens

    @property
    def markers(self) -> tuple[str, ...]:
        """A template with one of these texts uses the syntax."""
        return (self.opens,) if self.channels else (self.opens, self.closes)


SYNTAXES = (
    ReasoningSyntax("<think>", "</think>"),
    ReasoningSyntax("[THINK]", "[/THINK]"),
    ReasoningSyntax("<seed:think>", "</seed:think>"),
    ReasoningSyntax("<|channel>thought", "<channel|>", token="<|channel>"),
    ReasoningSyntax("<|channel|>", "<|end|>", channels=True),
)
"""Thoughts in other syntaxes are text."""


@lru_cache(8)
def reasoning_syntax_of(template: str) -> ReasoningSyntax | None:
    """The syntax that a chat template teaches; ``None``: none of these."""
    return next((syntax for syntax in SYNTAXES if any(text in template for text in syntax.markers)), None)


@dataclass(frozen=True, slots=True)
class ReasoningUse:
    """How the thoughts in a request's output are found."""

    syntax: ReasoningSyntax
    place: Place
    """Of the output's beginning."""
    is_shown: bool
    """The answer has them."""
    shows_special: bool
    """The syntax has a special token, which must be seen."""
    header: str = ""
    """With channels: what the prompt has of the output's first header."""

    def parser(self, inner: PartParser | None) -> PartParser:
        """``inner`` finds the parts of what is no thought."""
        if self.syntax.channels:
            return ChannelParser(self.header, self.is_shown, inner)
        return ReasoningParser(self, inner)


def reasoning_use(
    options: GenerationRequest, tokenizer: Tokenizer, read_tail: Callable[[], str]
) -> ReasoningUse | None:
    """``read_tail()`` is the end of the prompt's text. ``None`` for a request that is no chat, and where the model does
    not think. Raises :class:`ApiError` ``invalid`` where such a model's thoughts are to be limited."""
    if not isinstance(options, ChatOptions):
        return None
    template = tokenizer.template
    syntax = None if template is None else reasoning_syntax_of(template.source.text)
    cannot_limit = syntax is None or syntax.channels
    if cannot_limit and options.thinking_token_budget is not None and not options.fits_output:
        at, has = "thinking_token_budget", "no syntax of thoughts that this server can limit"
        raise bad_request(f"{at}: this model's chat template has {has}.", at)
    if syntax is None:
        return None
    tail = read_tail()
    end = tail.rstrip()
    place: Place = "within" if end.endswith(syntax.opens) else "after" if end.endswith(syntax.closes) else "before"
    special = not tokenizer.special_ids.keys().isdisjoint((syntax.opening_token, syntax.closes))
    header = header_within(tail) if syntax.channels else ""
    return ReasoningUse(syntax, place, options.include_reasoning is not False, special, header)


def reasoning_tokens(
    options: GenerationRequest,
    use: ReasoningUse | None,
    tokenizer: Tokenizer,
    grammar: Grammar | None,
    vocab_size: int,
) -> ReasoningTokens | None:
    """What the engine must know of an output's thoughts: where a grammar begins, and when they must end. ``None``:
    nothing; where thoughts are messages, a grammar has them in it. Raises :class:`ApiError` ``invalid`` where the
    syntax is no tokens of the model."""
    if use is None or use.syntax.channels or use.place == "after" or not isinstance(options, ChatOptions):
        return None
    budget = options.thinking_token_budget
    if grammar is None and budget is None:
        return None
    found = (tokenizer.id_of(text) for text in (use.syntax.opening_token, use.syntax.closes))
    opens, closes = (token if token is not None and token < vocab_size else None for token in found)
    if closes is None or (opens is None and use.place == "before"):
        if use.place == "before" and budget is None:
            return None  # it cannot begin to think either
        raise bad_request(
            f"{use.syntax.closes!r} is no token of this model, so its thoughts cannot be told from its answer: send "
            "chat_template_kwargs={'enable_thinking': false}, if its template has that.",
            "thinking_token_budget" if budget is not None else options.format_field,
        )
    return ReasoningTokens(closes, None if use.place == "within" else opens, budget)


class ReasoningParser(HoldingParser):
    """Feed it the visible text of an output, then :meth:`finish`. Parts are the same however the text is cut."""

    def __init__(self, use: ReasoningUse, inner: PartParser | None = None) -> None:
        self._syntax = use.syntax
        self._is_shown = use.is_shown
        self._inner = inner
        self._place = use.place
        self._held = ""
        """Text that may turn out to be the beginning of ``opens`` or ``closes``, or white space before it."""
        self._at_start = use.place != "after"
        """White space at the beginning of a thought, and of the answer after it, is none of either."""

    @property
    def is_reasoning(self) -> bool:
        return self._place == "within"

    def _parts(self, final: bool) -> Iterator[Part]:
        if self._place == "before":
            begun, opens = self._held.lstrip(), self._syntax.opens
            if begun.startswith(opens):
                self._place, self._held = "within", begun[len(opens) :]
            elif final or not opens.startswith(begun):
                self._place, self._at_start = "after", False
        if self._place == "within":
            yield from self._thought(final)
        if self._place == "after":
            text, self._held = self._held, ""
            if self._at_start:
                text = text.lstrip()
                self._at_start = not text
            yield from self._answer(text)

    def _thought(self, final: bool) -> Iterator[Part]:
        at = self._held.find(self._syntax.closes)
        if at >= 0:
            text, self._held = self._held[:at].rstrip(), self._held[at + len(self._syntax.closes) :]
            self._place = "after"
        elif final:
            text, self._held = self._held, ""
        else:
            certain = self._held[: len(self._held) - overlap(self._held, self._syntax.closes)].rstrip()
            text, self._held = certain, self._held[len(certain) :]
        if self._at_start:
            text = text.lstrip()
            self._at_start = not text or self._place == "after"
        elif self._place == "after":
            self._at_start = True
        if text and self._is_shown:
            yield Reasoning(text)

    def _answer(self, text: str) -> Iterator[Part]:
        if text:
            yield from (Text(text),) if self._inner is None else self._inner.feed(text)
