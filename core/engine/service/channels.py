"""Outputs that are messages, each with a header: the channel and the recipient in it say what a message is.

The format is harmony's (https://github.com/openai/harmony): ``<|start|>``, the role, ``<|channel|>``, the channel,
``<|message|>``, the content and a token that ends it. ``to=`` and a recipient may follow the role or the channel. A
prompt ends within the first header.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from engine.service.parts import CallText, HoldingParser, Part, PartParser, Reasoning, Text, overlap
from engine.service.tool_syntax import CHANNELS

LONGEST_HEADER = 512
"""Characters of what may still turn out to be a header."""
MESSAGE, ROLE = "<|message|>", "<|start|>assistant"
BEGIN = ("<|start|>", "<|channel|>")
"""Begin a header, whatever was before."""
END = ("<|end|>", "<|call|>", "<|return|>")
"""End a message."""
_FIRST = (*BEGIN, MESSAGE, "to=")
"""Where a message may begin, only a header with one of these first does."""
_HEADER = re.compile(r"(?:<\|start\|>)?[^<>\n]*(?:<\|channel\|>[^<>\n]*)?(?:<\|constrain\|>[^<>\n]*)?")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([^\s<]+)")


def header_within(tail: str) -> str:
    """What the end of a prompt has of the output's first header, after the role."""
    return tail.rpartition(ROLE)[2] if ROLE in tail else ""


class ChannelParser(HoldingParser):
    """Feed it the visible text of an output, then :meth:`finish`. Thoughts are what is in the channel ``analysis``,
    calls what a function is the recipient of, and everything else is text for the reader. Parts are the same however
    the text is cut; messages of the same kind have a line break between them."""

    def __init__(self, header: str, is_shown: bool, inner: PartParser | None) -> None:
        """``header``: as :func:`header_within` found it. ``is_shown``: the answer has thoughts. ``inner`` finds calls
        in :data:`~engine.service.tool_syntax.CHANNELS`; without it there are none."""
        self._held = header
        self._prompted = len(header)
        """Characters of the prompt in what is held."""
        self._is_shown = is_shown
        self._inner = inner
        self._in_header = True
        self._kind: type[Part] = Text
        """Of the message."""
        self._said: set[type[Part]] = set()
        self._begins = False
        """Nothing of the message has been passed on."""

    @property
    def is_reasoning(self) -> bool:
        return self._kind is Reasoning

    def _parts(self, final: bool) -> Iterator[Part]:
        while self._held:
            before = self._held, self._in_header
            yield from self._header(final) if self._in_header else self._content(final)
            if (self._held, self._in_header) == before:
                return

    def _header(self, final: bool) -> Iterator[Part]:
        begun = self._held.lstrip()
        is_one = bool(self._prompted) or begun.startswith(_FIRST)
        if not is_one:
            if final or not any(text.startswith(begun) for text in _FIRST):
                yield from self._no_header()
            return
        if not self._prompted:
            self._held = begun
        start = 0 if self._held.startswith(MESSAGE) else 1
        marks = [(at, text) for text in (MESSAGE, BEGIN[0], *END) if (at := self._held.find(text, start)) >= 0]
        at, mark = min(marks, default=(len(self._held) - len(MESSAGE), ""))
        if mark == MESSAGE and at <= LONGEST_HEADER and _HEADER.fullmatch(self._held, 0, at):
            header, self._held = self._held[:at], self._held[at + len(MESSAGE) :]
            self._prompted, self._in_header = 0, False
            yield from self._begin(header)
        elif mark or final or at >= LONGEST_HEADER:
            yield from self._no_header()

    def _no_header(self) -> Iterator[Part]:
        """What began like a header is content: its first character, for there may be one in what follows."""
        self._held = self._held[self._prompted :]
        first = 1 if not self._prompted and self._held.startswith(BEGIN) else 0
        self._prompted, self._in_header = 0, False
        text, self._held = self._held[:first], self._held[first:]
        yield from self._passed_on(text)

    def _begin(self, header: str) -> Iterator[Part]:
        channel, function = _CHANNEL.search(header), _FUNCTION.search(header)
        if function and self._inner is not None:
            self._kind = CallText
            yield from self._inner.feed(f"{CHANNELS.opens}{function[1]}{CHANNELS.after_name}")
        else:
            self._kind = Reasoning if channel and channel[1] == "analysis" else Text
        self._begins = True

    def _content(self, final: bool) -> Iterator[Part]:
        marks = (*BEGIN, *END)
        found = [(at, text) for text in marks if (at := self._held.find(text)) >= 0]
        held = 0 if final else max([overlap(self._held, text) for text in marks])
        at, mark = min(found, default=(len(self._held) - held, ""))
        text, self._held = self._held[:at], self._held[at:]
        yield from self._passed_on(text)
        if mark:
            self._in_header = True
        if mark in END:
            self._held, self._kind = self._held[len(mark) :], Text

    def _passed_on(self, text: str) -> Iterator[Part]:
        if not text:
            return
        if self._begins and self._kind in self._said and self._kind is not CallText:
            text = "\n" + text
        self._begins = False
        self._said.add(self._kind)
        if self._kind is Reasoning:
            if self._is_shown:
                yield Reasoning(text)
        else:
            yield from (Text(text),) if self._inner is None else self._inner.feed(text)
