"""One call of a tool, read as a model writes it, and its arguments as the JSON that clients get.

However the text is cut into pieces, what comes out is the same but for where it is cut.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from engine.service.literals import QUOTES, content_length, literal_as_json, quoted, unescaped
from engine.service.parts import begins, overlap
from engine.service.tool_syntax import CallSyntax

LONGEST_NAME = 256
"""Characters of what may still turn out to be the name of a function."""
_NO_KEYWORD = re.compile(r"[\s()\[\]{},=:]")


class CallReader(ABC):
    """Feed it the text after what opens a call, until it has :attr:`ended` or :attr:`failed`."""

    def __init__(self) -> None:
        self.raw = ""
        """The text that is no call once it has failed; all of it as long as that is not certain."""
        self.name = ""
        self.index: int | None = None
        """Once it is certain that it is a call: its number, from whoever reads it."""
        self.ended = self.failed = False
        self.rest = ""
        """What follows, once it has ended or failed."""

    @abstractmethod
    def feed(self, text: str) -> Iterator[str]:
        """Pieces of the arguments; the first may be empty and says that this is a call."""

    def _fail(self, text: str) -> None:
        """``text``: all of it; there may be a call within."""
        self.failed, self.raw, self.rest = True, "", text


def reader_of(syntax: CallSyntax, functions: Mapping[str, Mapping[str, Any]], is_certain: bool = False) -> CallReader:
    """``functions``: the schemas of their parameters, by name. ``is_certain``: what has the name of one is a call,
    whatever follows."""
    if syntax.form == "object":
        return ObjectReader(syntax.arguments, None if syntax.opens else frozenset(functions))
    if syntax.form == "named":
        return NamedReader(syntax.before_name, syntax.after_name)
    if syntax.form == "marked":
        return MarkedReader(syntax, functions)
    return LiteralReader(syntax, functions, is_certain)


class ObjectReader(CallReader):
    """A JSON object that has the name and the arguments."""

    def __init__(self, arguments: str, names: frozenset[str] | None) -> None:
        super().__init__()
        self._key_of_arguments = arguments
        self._names = names
        self._depth = 0
        self._string = self._escaped = False
        self._token = ""
        """The key or value at the first level that is being read."""
        self._key: str | None = None
        self._value_begun = False
        self._arguments: str | None = None
        """Read before the name."""

    def feed(self, text: str) -> Iterator[str]:
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
            self._note(character)
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
        self._note(character)
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

    def _note(self, character: str) -> None:
        """Keep what is not passed on as it comes."""
        if not self._streams:
            self._token += character

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


class NamedReader(CallReader):
    """A name, a text after it, and the arguments as a JSON object."""

    def __init__(self, before_name: str, after_name: str) -> None:
        super().__init__()
        self._before, self._after = before_name, after_name
        self._depth = 0
        self._string = self._escaped = False

    def feed(self, text: str) -> Iterator[str]:
        if self.name:
            yield from self._arguments(text)
            return
        self.raw += text
        at = self.raw.find(self._after, 0, LONGEST_NAME)
        if at < 0:
            if len(self.raw) >= LONGEST_NAME:
                self._fail(self.raw)
            return
        found = self.raw[:at].strip().removeprefix(self._before)
        # Some models count their calls behind the name, or give them an id.
        name, begun = found.partition("[CALL_ID]")[0].partition(":")[0], self.raw[at + len(self._after) :].lstrip()
        if not name or any(character.isspace() or character in "<>{}[]" for character in name):
            self._fail(self.raw)
        elif begun.startswith("{"):
            self.name = name
            yield from self._arguments(begun)
        elif begun:
            self._fail(self.raw)

    def _arguments(self, text: str) -> Iterator[str]:
        for at, character in enumerate(text):
            if self._string:
                self._string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            else:
                self._string = character == '"'
                self._depth += (character in "{[") - (character in "}]")
                if self._depth == 0:
                    self.ended, self.rest = True, text[at + 1 :]
                    text = text[: at + 1]
                    break
        yield text


class ParameterReader(CallReader):
    """A name, and parameters one by one."""

    def __init__(self, syntax: CallSyntax, functions: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._syntax = syntax
        self._functions = functions
        self._held = ""
        self._key: str | None = None
        """Of the value that is being read."""
        self._is_first = True

    def feed(self, text: str) -> Iterator[str]:
        if self.index is None:
            self.raw += text
        self._held += text
        while not (self.ended or self.failed):
            before = len(self._held), self._key, self.name
            if not self.name:
                yield from self._read_name()
            elif self._key is None:
                yield from self._read_key()
            else:
                yield from self._read_value(self._key)
            if (len(self._held), self._key, self.name) == before:
                return

    @abstractmethod
    def _named(self) -> Iterable[str]:
        """What is certain once the name is."""

    @abstractmethod
    def _read_key(self) -> Iterator[str]:
        """The name of the next parameter, or the end."""

    @abstractmethod
    def _read_value(self, key: str) -> Iterator[str]:
        """A piece of a value."""

    def _read_name(self) -> Iterator[str]:
        before, after = self._syntax.before_name, self._syntax.after_name
        begun = self._held.lstrip()
        if not begun.startswith(before):
            if not before.startswith(begun):
                self._fail(self.raw)
            return
        begun = begun[len(before) :]
        name = begun[: next((i for i, c in enumerate(begun) if not (c.isalnum() or c in "_.:-")), len(begun))]
        rest = begun[len(name) :]
        if len(name) > LONGEST_NAME or (rest and not (name and (rest.startswith(after) or after.startswith(rest)))):
            self._fail(self.raw)
        elif rest and rest.startswith(after):
            self.name, self._held = name, rest[len(after) :]
            yield from self._named()

    def _begin_value(self, key: str) -> str:
        opening, self._is_first = "{" if self._is_first else ", ", False
        self._key = key
        return f"{opening}{quoted(key)}: "

    def _end(self, rest: str) -> str:
        self.ended, self.rest = True, rest
        return "{}" if self._is_first else "}"


class MarkedReader(ParameterReader):
    """Each parameter's name and value stand between texts. A value is text: what the function's schema does not say is
    a string is JSON, where it can be read as that."""

    def __init__(self, syntax: CallSyntax, functions: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(syntax, functions)
        self._streams = self._value_begun = False

    def _named(self) -> Iterable[str]:
        return ("",)

    def _read_key(self) -> Iterator[str]:
        syntax, begun = self._syntax, self._held.lstrip()
        if begun.startswith(syntax.ends):
            yield self._end(begun[len(syntax.ends) if syntax.takes_end else 0 :])
        elif begun.startswith(syntax.before_key):
            key, found, rest = begun[len(syntax.before_key) :].partition(syntax.after_key)
            if found:
                self._held, self._streams, self._value_begun = rest, self._is_string(key.strip()), False
                yield self._begin_value(key.strip()) + '"' * self._streams
        elif begun and not (syntax.before_key.startswith(begun) or syntax.ends.startswith(begun)):
            yield self._end(self._held)  # of a call that is one already, what follows is no part

    def _read_value(self, key: str) -> Iterator[str]:
        if not self._value_begun:
            opens = self._syntax.before_value
            begun = self._held.lstrip() if opens else self._held
            if not begun.startswith(opens):
                if not opens.startswith(begun):
                    self._key = None
                    yield "null" + self._end(self._held)
                return
            begun = begun[len(opens) :]
            if not begun:
                return
            self._held, self._value_begun = begun.removeprefix("\n"), True
        closes = self._syntax.after_value
        at = self._held.find(closes)
        if at >= 0:
            value, rest = self._held[:at].removesuffix("\n"), self._held[at + len(closes) :]
            yield self._end_value(value, rest)
        elif self._streams:  # a line break before the end is none of the value
            certain = len(self._held) - max(overlap(self._held, "\n" + closes), overlap(self._held, closes))
            piece, self._held = self._held[:certain], self._held[certain:]
            if piece:
                yield quoted(piece)[1:-1]

    def _end_value(self, value: str, rest: str) -> str:
        self._key, self._held = None, rest
        if self._streams:
            return quoted(value)[1:]
        try:
            json.loads(value, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return quoted(value)
        return value.strip()

    def _is_string(self, key: str) -> bool:
        """Whether the function's schema says that the parameter is nothing but a string."""
        properties = self._functions.get(self.name, {}).get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return isinstance(schema, Mapping) and schema.get("type") == "string"


class LiteralReader(ParameterReader):
    """Parameters are keywords, and values literals. A string is passed on while it is written, any other value when it
    is complete; one that is no literal is a string of what is there."""

    def __init__(self, syntax: CallSyntax, functions: Mapping[str, Mapping[str, Any]], is_certain: bool) -> None:
        super().__init__(syntax, functions)
        self._is_certain = is_certain
        self._quotes = (syntax.quote, *QUOTES) if syntax.quote else QUOTES
        self._needs_comma = False
        self._string = ""
        """The quote that ends the string which is being passed on."""
        self._at = self._depth = 0
        """How far a value that is held has been looked at, and the brackets that are open there."""
        self._within = ""
        """The quote of the string that is open there."""

    def _named(self) -> Iterable[str]:
        if not self._syntax.opens and self.name not in self._functions:
            self._fail(self.raw)
            return ()
        return ("",) * self._is_certain

    def _read_key(self) -> Iterator[str]:
        ends, begun = self._syntax.ends, self._held.lstrip()
        if begun.startswith(ends):
            yield self._end(begun[len(ends) :])
        elif begun and self._needs_comma and begun[0] == ",":
            self._held, self._needs_comma = begun[1:], False
        elif begun and not ends.startswith(begun):
            key, found, rest = begun.partition(self._syntax.after_key)
            if not found:  # but for what may be the beginning of it
                key = key[: len(key) - overlap(key, self._syntax.after_key)]
            name = key.strip()
            if self._needs_comma or len(key) > LONGEST_NAME or _NO_KEYWORD.search(name) or (found and not name):
                yield from self._broken()
            elif found:
                self._held = rest
                quote = next((text for text in self._quotes if name.startswith(text) and name.endswith(text)), "")
                yield self._begin_value(name.removeprefix(quote).removesuffix(quote))

    def _broken(self) -> Iterator[str]:
        """What follows is no part of a call that is one already."""
        if self.index is None:
            self._fail(self.raw)
        else:
            yield self._end(self._held)

    def _read_value(self, key: str) -> Iterator[str]:
        if self._string:
            yield from self._read_string(self._string)
            return
        if not self._at:
            self._held = self._held.lstrip()
            quote = _first_of(self._quotes, self._held, 0)
            if quote:
                self._string, self._held = quote, self._held[len(quote) :]
                yield '"'
            if quote is None or quote:
                return
        if (at := self._value_end()) is not None:
            value = self._held[:at].strip()
            self._end_value(at)
            yield literal_as_json(value, self._syntax.quote) or quoted(value)

    def _read_string(self, quote: str) -> Iterator[str]:
        held, escapes = self._held, quote in QUOTES
        if escapes:
            at = content_length(held, quote)
            ended = held.startswith(quote, at)
        else:
            at, ended = held.find(quote), quote in held
            at = at if ended else len(held) - overlap(held, quote)
        piece, self._held = held[:at], held[at:]
        if piece:
            yield unescaped(piece) if escapes else quoted(piece)[1:-1]
        if ended:
            self._string = ""
            self._end_value(len(quote))
            yield '"'

    def _end_value(self, at: int) -> None:
        self._key, self._held, self._needs_comma = None, self._held[at:], True
        self._at = self._depth = 0

    def _value_end(self) -> int | None:
        """Where the value that is held ends: at a comma, or where no bracket of its own is open. ``None``: it may go
        on."""
        while self._at < len(self._held):
            step = self._within_string() if self._within else self._between_strings()
            if step is None:
                return None
            if step == 0:
                return self._at
            self._at += step
        return None

    def _within_string(self) -> int | None:
        if self._within in QUOTES and self._held[self._at] == "\\":
            return 2 if self._at + 1 < len(self._held) else None
        closes = begins(self._held, self._at, self._within)
        if closes:
            step, self._within = len(self._within), ""
            return step
        return None if closes is None else 1

    def _between_strings(self) -> int | None:
        """0 at the end of the value."""
        sought = self._quotes if self._depth else (*self._quotes, self._syntax.ends)
        found = _first_of(sought, self._held, self._at)
        if found:
            self._within = found if found in self._quotes else ""
            return len(self._within)
        if found is None:
            return None
        character = self._held[self._at]
        if not self._depth and character in ",)]}":
            return 0
        self._depth += (character in "([{") - (character in ")]}")
        return 1


def _first_of(sought: Iterable[str], text: str, at: int) -> str | None:
    """The first of several texts that stands at ``at``; empty: none does. ``None``: more text must tell, as one of them
    may begin another."""
    for each in sought:
        if (stands := begins(text, at, each)) is not False:
            return each if stands else None
    return ""


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN and infinities are no JSON
