"""Calls of tools in the text of an output, as it grows: what is a call, and what is text for the reader.

However the text is cut into pieces, the parts are the same but for where they are cut. What begins like a call and is
none is text: nothing is lost. The arguments of a call are passed on as the model writes them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

from engine.service.parts import CallText, Part, Text, merged, overlap
from engine.service.tool_syntax import CallSyntax


class ToolParser:
    """Feed it the visible text of an output, then :meth:`finish`."""

    is_reasoning = False

    def __init__(self, syntax: CallSyntax, names: frozenset[str], most: int | None = None) -> None:
        """``names``: of the functions on offer; without tags only they are calls. ``most``: calls, others are left
        out."""
        self._syntax = syntax
        self._names = None if syntax.opens else names
        self._most = most
        self.num_calls = 0
        """Calls so far, finished or not."""
        self._held = ""
        """Text that may turn out to be the beginning of ``opens``, ``closes`` or a call."""
        self._call: _Call | None = None
        self._in_list = False
        self._closing = False
        """A call has ended: ``closes``, white space or the next of a list may follow."""
        self._at_start = True
        self._after_call = False
        self._lead = ""
        """What led to a call, and is text if it is none."""

    def feed(self, text: str) -> tuple[Part, ...]:
        """The parts that become certain with this text."""
        self._held += text
        return merged([*self._parts(final=False)])

    def finish(self) -> tuple[Part, ...]:
        """The rest: what was held back is text."""
        return merged([*self._parts(final=True)])

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
        if not opens:
            start = len(self._held) - len(self._held.lstrip()) if self._at_start else -1
            if start < 0 or (start < len(self._held) and self._held[start] != "{"):
                yield from self._shown(len(self._held))
            elif start < len(self._held):
                self._lead = "" if self._after_call else self._held[:start]
                self._begin(start)
            return
        at = self._held.find(opens)
        if at >= 0:
            yield from self._shown(at)
            self._held, self._lead = self._held[len(opens) :], opens
            self._in_list = self._syntax.listed
            self._closing = self._in_list  # up to the bracket of the list
            if not self._in_list:
                self._begin(0)
        elif not final:
            yield from self._shown(len(self._held) - overlap(self._held, opens))
        else:
            yield from self._shown(len(self._held))

    def _shown(self, count: int) -> Iterator[Part]:
        text, self._held = self._held[:count], self._held[count:]
        if self._after_call:  # line breaks after a call are none of the reader's
            text = text.lstrip()
        if text:
            self._after_call = False
            self._at_start = self._at_start and not text.strip()
            yield Text(text)

    def _begin(self, at: int) -> None:
        self._held = self._held[at:]
        self._call = _Call(self._syntax.arguments, self._names)

    def _read_call(self, call: _Call, final: bool) -> Iterator[Part]:
        text, self._held = self._held, ""
        is_kept = self._most is None or call.index is not None or self.num_calls < self._most
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
            self._after_call, self._lead = True, ""

    def _no_call(self, text: str) -> Iterator[Part]:
        """What began like a call is text."""
        lead, self._lead = self._lead, ""
        self._at_start = self._after_call = False
        if lead or text:
            yield Text(lead + text)

    def _read_closing(self, final: bool) -> Iterator[Part]:
        """What stands between calls, and after the last."""
        rest = self._held.lstrip(" \t\r\n,;[" if self._in_list else " \t\r\n;")
        if self._in_list:
            self._lead += self._held[: len(self._held) - len(rest)]
            self._held = rest
            if rest.startswith("{"):
                self._closing = False
                self._begin(0)
            elif rest or final:
                self._closing = self._in_list = False
                if self._lead.startswith(self._syntax.opens):
                    yield from self._no_call("")
                else:
                    self._held = rest.removeprefix("]")
            return
        closes = self._syntax.closes
        if closes and rest.startswith(closes):
            self._held, self._closing = rest[len(closes) :], False
        elif final or (rest and not closes.startswith(rest)):
            self._closing, self._at_start, self._held = False, not closes, rest


class _Call:
    """The JSON object of one call."""

    def __init__(self, arguments: str, names: frozenset[str] | None) -> None:
        self._key_of_arguments = arguments
        self._names = names
        self.raw = ""
        """All of it, as long as it may turn out to be none."""
        self.name = ""
        self.index: int | None = None
        """Once it is certain that it is one."""
        self.ended = self.failed = False
        self.rest = ""
        """What follows its end."""
        self._depth = 0
        self._string = self._escaped = False
        self._token = ""
        """The key or value at the first level that is being read."""
        self._key: str | None = None
        self._value_begun = False
        self._arguments: str | None = None
        """Read before the name."""

    def feed(self, text: str) -> Iterator[str]:
        """Pieces of the arguments; the first may be empty and says that this is a call."""
        piece = ""
        for at, character in enumerate(text):
            if self.index is None:
                self.raw += character
            step = self._step(character)
            if self.failed:
                # Of a call that is one already, what follows is no part.
                self.rest = text[at + 1 :] if self.index is None else text[at:]
                self.ended = self.index is not None
                break
            if step is not None:
                piece += step
                if self.index is None:
                    yield piece  # the caller gives it a number
                    piece = ""
            if self.ended:
                self.rest = text[at + 1 :]
                break
        if piece:
            yield piece

    def _step(self, character: str) -> str | None:
        """What is new of the arguments; ``None``: nothing, and no more is certain than before."""
        if self._depth == 0:
            if character == "{":
                self._depth = 1
            elif not character.isspace():
                self.failed = True
            return None
        in_value = self._key is not None and self._value_begun
        if self._string:
            self._token += character
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._string = False
                if self._depth == 1 and self._key is None:
                    self._end_key()
                    return None
            return self._streamed(character) if in_value else None
        if self._depth == 1 and not in_value:
            return self._between(character)
        if character == '"':
            self._string = True
        if self._depth == 1 and character in ",}":
            done = self._end_value()
            if character == "}" and not self.failed:
                return self._end(done)
            return done
        self._depth += (character in "{[") - (character in "}]")
        if self._depth == 0 and character == "]":
            self.failed = True
            return None
        self._token += character
        return self._streamed(character)

    def _between(self, character: str) -> str | None:
        """Keys, colons and commas of the first level."""
        if self._key is None:
            if character == '"':
                self._string, self._token = True, '"'
            elif character == "}":
                return self._end(None)
            elif not character.isspace() and character != ",":
                self.failed = True
            return None
        if character == ":" or character.isspace():
            return None
        self._value_begun, self._token = True, character
        self._string = character == '"'
        self._depth += character in "{["
        return self._streamed(character)

    def _end_key(self) -> None:
        try:
            self._key = str(json.loads(self._token))
        except ValueError:
            self.failed = True
        self._token, self._value_begun = "", False

    @property
    def _streams(self) -> bool:
        """The value being read is what the arguments are, of a call whose name is known."""
        return self._key == self._key_of_arguments and bool(self.name) and not self._token.startswith('"')

    def _streamed(self, character: str) -> str | None:
        return character if self._streams else None

    def _end_value(self) -> str | None:
        """At the comma or bracket after a value of the first level."""
        key, token = self._key, self._token.strip()
        streamed = self._streams
        self._key, self._token, self._value_begun = None, "", False
        if streamed:
            return None
        try:
            value = json.loads(token)
        except ValueError:
            self.failed = self.index is None
            return None
        if key == "name":
            if not isinstance(value, str) or not value or (self._names is not None and value not in self._names):
                self.failed = True
                return None
            self.name = value
            found, self._arguments = self._arguments, None
            return found
        if key == self._key_of_arguments:
            text = value if isinstance(value, str) else token
            if self.name:
                return text
            self._arguments = text
        return None

    def _end(self, done: str | None) -> str | None:
        if not self.name:
            self.failed = True
            return None
        self.ended = True
        if done is None and self.index is None:
            return "{}"  # it was called without arguments
        return done
