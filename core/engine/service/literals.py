"""Values as models write them where calls are no JSON: literals of Python or of JSON, read as JSON.

Nothing is evaluated. A text is one of the few literals that JSON has a form for, or it is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache

MOST_NESTED = 64
"""Lists and mappings within each other; what is deeper is no literal."""
QUOTES = ('"', "'")
"""Around strings that have escapes."""
_WORDS = {"True": "true", "False": "false", "None": "null"} | {word: word for word in ("true", "false", "null")}
_CONTENT = {
    quote: re.compile(
        rf"(?:[^{quote}\\]|\\[^ux]|\\u[0-9a-fA-F]{{4}}|\\x[0-9a-fA-F]{{2}}"
        r"|\\u(?![0-9a-fA-F]{0,3}\Z)|\\x(?![0-9a-fA-F]?\Z))*+"
    )
    for quote in QUOTES
}
"""What is certain of a string's content: all but the beginning of an escape at the end."""
_ESCAPED = re.compile(r'\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[\s\S])|[\x00-\x1f"\\]')


def quoted(text: str) -> str:
    """A text as JSON."""
    return json.dumps(text, ensure_ascii=False)


def content_length(text: str, quote: str) -> int:
    """Characters at the beginning of ``text`` that are certain to be the content of a string: up to the quote that ends
    it, or to an escape that more text may complete."""
    found = _CONTENT[quote].match(text)
    return found.end() if found else 0


def unescaped(content: str) -> str:
    """What is between the quotes of a string with escapes, as it stands between those of JSON. JSON's own escapes stay;
    one that neither JSON nor this function knows is what it is written as."""
    return _ESCAPED.sub(_in_json, content)


def _in_json(found: re.Match[str]) -> str:
    escape = found[1]
    if escape is None:
        return quoted(found[0])[1:-1]
    if escape in tuple('"\\/bfnrt') or (escape[0] == "u" and len(escape) > 1):
        return found[0]
    if escape[0] == "x" and len(escape) > 1:
        return rf"\u00{escape[1:]}"
    return "'" if escape == "'" else quoted(found[0])[1:-1]


def literal_as_json(text: str, quote: str = "") -> str | None:
    """JSON of a literal; ``None``: it is none. ``quote``: what is around strings that have no escapes, besides
    :data:`QUOTES`. Names without quotes may be keys of mappings."""
    tokens = _tokens(text, quote)
    try:
        value = _value(tokens, next(tokens), 0)
        return value if next(tokens, None) is None else None
    except (StopIteration, ValueError):
        return None


Token = tuple[str, str]
"""A kind, and the token as JSON or as it is."""


@cache
def _pattern(quote: str) -> re.Pattern[str]:
    strings = [rf"{each}(?:[^{each}\\]|\\[\s\S])*+{each}" for each in QUOTES]
    plain = rf"(?P<plain>{re.escape(quote)}[\s\S]*?{re.escape(quote)})|" if quote else ""
    return re.compile(
        rf"\s*(?:{plain}(?P<string>{'|'.join(strings)})"
        r"|(?P<number>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?![\w.]))"
        r"|(?P<word>[^\W\d][\w.-]*)|(?P<mark>[\[\]{}:,]))"
    )


def _tokens(text: str, quote: str) -> Iterator[Token]:
    """Raises ``ValueError`` for what is none."""
    pattern, at, text = _pattern(quote), 0, text.rstrip()
    while at < len(text):
        found = pattern.match(text, at)
        if found is None or found.lastgroup is None:
            raise ValueError(text[at:])
        at, kind = found.end(), found.lastgroup
        token = found[kind]
        if kind == "plain":
            yield "string", quoted(token[len(quote) : -len(quote)])
        elif kind == "string":
            yield kind, f'"{unescaped(token[1:-1])}"'
        else:
            yield kind, token


def _value(tokens: Iterator[Token], first: Token, depth: int) -> str:
    """A value that begins with the token ``first``. Raises ``StopIteration`` and ``ValueError``."""
    kind, token = first
    if kind in ("string", "number"):
        return token
    if kind == "word" and token in _WORDS:
        return _WORDS[token]
    if depth < MOST_NESTED and token == "[":
        return f"[{_items(tokens, ']', lambda each: _value(tokens, each, depth + 1))}]"
    if depth < MOST_NESTED and token == "{":
        return f"{{{_items(tokens, '}', lambda each: _pair(tokens, each, depth + 1))}}}"
    raise ValueError(token)


def _items(tokens: Iterator[Token], closes: str, item: Callable[[Token], str]) -> str:
    """Items up to the bracket ``closes``; a comma may stand before it."""
    found: list[str] = []
    while (token := next(tokens)) != ("mark", closes):
        found.append(item(token))
        if (token := next(tokens)) == ("mark", closes):
            break
        if token != ("mark", ","):
            raise ValueError(token[1])
    return ", ".join(found)


def _pair(tokens: Iterator[Token], first: Token, depth: int) -> str:
    kind, token = first
    if kind == "mark" or next(tokens) != ("mark", ":"):
        raise ValueError(token)
    return f"{token if kind == 'string' else quoted(token)}: {_value(tokens, next(tokens), depth)}"
