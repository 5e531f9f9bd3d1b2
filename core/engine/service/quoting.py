"""What a request brings is text: where a message spells a special token, a placeholder takes its place while the chat
template runs, so that the tokenizer can tell quoted text from structure."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.service.turns import PlainConversation

_PLACEHOLDER = re.compile("\ue000[0-9a-f]{16}\ue001")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt. ``quoted`` maps placeholders in ``text`` to special tokens, or beginnings of some, that a message
    merely spells."""

    text: str
    quoted: dict[str, str] = field(default_factory=dict)

    def unquote(self, piece: str) -> str:
        if not self.quoted:
            return piece
        return _PLACEHOLDER.sub(lambda match: self.quoted.get(match.group(), match.group()), piece)


def specials_pattern(names: Iterable[str], *, begun: bool = False) -> re.Pattern[str]:
    """Matches the longest of ``names``, as a group. ``begun``: also what begins one at the end of a text, of names
    that begin with a mark: a template may put another text right behind it, such as the next part of a message. Names
    that begin like words have no such beginnings, which names of fields would be.

    A pattern with an alternative for each name would try hundreds, or thousands, wherever one could begin, and nothing
    else runs in this process meanwhile. Here the alternatives are characters: a trie of the names.
    """
    trie: dict[str, Any] = {}
    for name in names:
        node = trie
        for character in name:
            node = node.setdefault(character, {})
        node[""] = {}
    if not begun:
        return re.compile(f"({_alternatives(trie)})")
    either = [
        re.escape(character) + _alternatives(rest, begun=not (character.isalnum() or character.isspace()))
        for character, rest in trie.items()
    ]
    return re.compile(f"({'|'.join(either)})")


def _alternatives(node: dict[str, Any], begun: bool = False) -> str:
    found = [re.escape(character) + _alternatives(rest, begun) for character, rest in node.items() if character]
    ends = "" in node
    if begun and found and not ends:
        found.append(r"\Z")
    if len(found) == 1 and not ends:
        return found[0]
    return f"(?:{'|'.join(found)}){'?' if ends else ''}" if found else ""


def quoted(
    conversation: PlainConversation, specials: re.Pattern[str] | None
) -> tuple[PlainConversation, dict[str, str]]:
    """The conversation with placeholders in all of its strings but the roles, at every depth, and what each placeholder
    stands for. ``specials`` matches special tokens, and what begins one at the end of a text; ``None``: there are
    none."""
    placeholders: dict[str, str] = {}
    if specials is None:
        return conversation, placeholders

    def placeholder(match: re.Match[str]) -> str:
        literal = match.group()
        if literal not in placeholders:
            # Unguessable, so that a message cannot contain one.
            placeholders[literal] = f"\ue000{secrets.token_hex(8)}\ue001"
        return placeholders[literal]

    def walked(value: Any) -> Any:
        if isinstance(value, str):
            return specials.sub(placeholder, value)
        if isinstance(value, Mapping):
            return {walked(key): walked(item) for key, item in value.items()}
        return [walked(item) for item in value] if isinstance(value, (list, tuple)) else value

    def turn(message: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value if key == "role" else walked(value) for key, value in message.items()}

    found = PlainConversation(
        [turn(message) for message in conversation.messages],
        conversation.add_generation_prompt,
        walked(conversation.variables),
        walked(conversation.tools),
        walked(conversation.documents),
    )
    return found, {placeholder: literal for literal, placeholder in placeholders.items()}
