"""Calls of tools in the text of an output, as it grows: what is a call, and what is text for the reader.

However the text is cut into pieces, the parts are the same but for where they are cut. What begins like a call and is
none is text: nothing is lost. The arguments of a call are passed on as the model writes them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from engine.service.call_readers import CallReader, reader_of
from engine.service.parts import CallText, Part, Text, merged, overlap
from engine.service.tool_syntax import CallSyntax


class ToolParser:
    """Feed it the visible text of an output, then :meth:`finish`."""

    is_reasoning = False

    def __init__(
        self,
        syntax: CallSyntax,
        functions: Mapping[str, Mapping[str, Any]],
        most: int | None = None,
        calls_only: bool = False,
    ) -> None:
        """``functions``: those on offer, by name, with the schemas of their parameters; without tags only they are
        calls. ``most``: calls, others are left out. ``calls_only``: a grammar allows nothing else; what is none was
        cut, and is left out."""
        self._calls_only = calls_only
        self._syntax = syntax
        self._functions = functions
        self._most = most
        self.num_calls = 0
        """Calls so far, finished or not."""
        self._held = ""
        """Text that may turn out to be the beginning of ``opens``, ``closes`` or a call."""
        self._call: CallReader | None = None
        self._in_list = self._list_is_empty = False
        self._closing = False
        """A call has ended: ``closes``, white space or the next of a list may follow."""
        self._at_start = True
        self._after_call = False
        self._lead = ""
        """What led to a call, and is text if it is none."""

    def feed(self, text: str) -> tuple[Part, ...]:
        """The parts that become certain with this text."""
        self._held += text
        return self._shown_parts(final=False)

    def finish(self) -> tuple[Part, ...]:
        """The rest: what was held back is text."""
        return self._shown_parts(final=True)

    def _shown_parts(self, final: bool) -> tuple[Part, ...]:
        parts = [*self._parts(final)]
        return merged([part for part in parts if not (self._calls_only and isinstance(part, Text))])

    def _parts(self, final: bool) -> Iterator[Part]:
        while True:
            before = self._state
            if self._call is not None:
                yield from self._read_call(self._call, final)
            elif self._closing:
                yield from self._read_closing(final)
            else:
                yield from self._read_text(final)
            if self._state == before or not (self._held or (self._closing and final)):
                break
        if final and self._call is None:
            yield from self._shown(len(self._held))

    @property
    def _state(self) -> tuple[object, ...]:
        return len(self._held), self._call, self._closing, self._in_list

    def _read_text(self, final: bool) -> Iterator[Part]:
        """Text up to where a call begins."""
        opens = self._syntax.opens
        if self._at_start and not opens:
            start = len(self._held) - len(self._held.lstrip())
            if self._held[start:].startswith("[" if self._syntax.listed else "{"):
                self._lead, self._held = "" if self._after_call else self._held[:start], self._held[start:]
                self._open()
                return
            if start == len(self._held):
                return
        sought = [text for text in (opens, *self._syntax.wraps) if text]
        found = [(at, text != opens, text) for text in sought if (at := self._held.find(text)) >= 0]
        if found:
            at, is_wrap, text = min(found)
            yield from self._shown(at)
            self._held = self._held[len(text) :]
            if not is_wrap:
                self._lead = text
                self._open()
        else:
            held = 0 if final else max([overlap(self._held, text) for text in sought], default=0)
            yield from self._shown(len(self._held) - held)

    def _open(self) -> None:
        """A call begins, or a list of calls."""
        self._in_list = self._closing = self._list_is_empty = self._syntax.listed
        if not self._in_list:
            self._begin()

    def _shown(self, count: int) -> Iterator[Part]:
        text, self._held = self._held[:count], self._held[count:]
        if self._after_call:  # line breaks after a call are none of the reader's
            text = text.lstrip()
        if text:
            self._after_call = False
            self._at_start = self._at_start and not text.strip()
            yield Text(text)

    def _begin(self) -> None:
        self._call = reader_of(self._syntax, self._functions, self._calls_only)

    def _read_call(self, call: CallReader, final: bool) -> Iterator[Part]:
        text, self._held = self._held, ""
        is_kept = self._most is None or (self.num_calls if call.index is None else call.index) < self._most
        for piece in call.feed(text):
            if call.index is None:
                call.index = self.num_calls
                self.num_calls += 1
                if is_kept:
                    yield CallText(call.index, "", secrets.token_hex(5)[:9], call.name)
            if piece and is_kept:
                yield CallText(call.index, piece)
        if call.index is None and (call.failed or final):
            self._call, self._held = None, call.rest
            self._closing = self._in_list = False
            yield from self._no_call(call.raw)
        elif call.ended:
            self._call, self._closing, self._held = None, True, call.rest
            self._after_call, self._list_is_empty, self._lead = True, False, ""

    def _no_call(self, text: str) -> Iterator[Part]:
        """What began like a call is text."""
        lead, self._lead = self._lead, ""
        self._at_start = self._after_call = False
        if lead or text:
            yield Text(lead + text)

    def _read_closing(self, final: bool) -> Iterator[Part]:
        """What follows a call."""
        if self._in_list:
            yield from self._read_list(final)
            return
        closes, rest = self._syntax.closes, self._held.lstrip(" \t\r\n;")
        if closes and rest.startswith(closes):
            self._held, self._closing = rest[len(closes) :], False
        elif final or (rest and not closes.startswith(rest)):
            self._closing, self._at_start, self._held = False, not closes, rest

    def _read_list(self, final: bool) -> Iterator[Part]:
        """What stands between the calls of a list, and after the last."""
        rest = self._held.lstrip(" \t\r\n,;[")
        self._lead += self._held[: len(self._held) - len(rest)]
        self._held = rest
        if rest and self._begins_call(rest[0]):
            self._closing = False
            self._begin()
        elif rest or final:
            self._in_list = False
            if self._list_is_empty:
                self._closing = False
                yield from self._no_call("")
            else:
                self._held = rest.removeprefix("]")

    def _begins_call(self, character: str) -> bool:
        if self._syntax.form == "object":
            return character == "{"
        return character.isalnum() or character == "_"
