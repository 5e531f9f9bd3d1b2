"""What a request brings is text: where a message spells a special token, a placeholder takes its place while the chat
template runs, so that the tokenizer can tell quoted text from structure."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_PLACEHOLDER = re.compile("\ue000[0-9a-f]{16}\ue001")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt. ``quoted`` maps placeholders in ``text`` to special tokens that a message merely spells."""

    text: str
    quoted: dict[str, str] = field(default_factory=dict)

    def unquote(self, piece: str) -> str:
        if not self.quoted:
            return piece
        return _PLACEHOLDER.sub(lambda match: self.quoted.get(match.group(), match.group()), piece)


def specials_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of ``names``, as a group.

    A pattern with an alternative for each name would try hundreds, or thousands, wherever one could begin, and nothing
    else runs in this process meanwhile. Here the alternatives are characters: a trie of the names.
    """
    trie: dict[str, Any] = {}
    for name in names:
        node = trie
        for character in name:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(f"({_alternatives(trie)})")


def _alternatives(node: dict[str, Any]) -> str:
    found = [re.escape(character) + _alternatives(rest) for character, rest in node.items() if character]
    ends = "" in node
    if len(found) == 1 and not ends:
        return found[0]
    return f"(?:{'|'.join(found)}){'?' if ends else ''}" if found else ""


def quoted_messages(
    messages: Sequence[dict[str, Any]], variables: Mapping[str, Any], specials: re.Pattern[str] | None
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, str]]:
    """The conversation and the variables of its template with placeholders, at every depth, and what each stands for.
    ``specials`` matches special tokens."""
    placeholders: dict[str, str] = {}

    def placeholder(match: re.Match[str]) -> str:
        literal = match.group()
        if literal not in placeholders:
            # Unguessable, so that a message cannot contain one.
            placeholders[literal] = f"\ue000{secrets.token_hex(8)}\ue001"
        return placeholders[literal]

    def quoted(value: Any) -> Any:
        if specials is None:
            return value
        if isinstance(value, str):
            return specials.sub(placeholder, value)
        if isinstance(value, Mapping):
            return {quoted(key): quoted(item) for key, item in value.items()}
        return [quoted(item) for item in value] if isinstance(value, (list, tuple)) else value

    turns = [{key: value if key == "role" else quoted(value) for key, value in turn.items()} for turn in messages]
    found = quoted(variables)
    return turns, found, {placeholder: literal for literal, placeholder in placeholders.items()}
