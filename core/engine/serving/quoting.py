"""What a request brings is text: where a message spells a special token, a placeholder takes its place while the chat
template runs, so that the tokenizer can tell quoted text from structure."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt. ``quoted`` maps placeholders in ``text`` to special tokens that a message merely spells."""

    text: str
    quoted: dict[str, str] = field(default_factory=dict)

    def unquote(self, piece: str) -> str:
        for placeholder, literal in self.quoted.items():
            piece = piece.replace(placeholder, literal)
        return piece


def quote_messages(
    messages: Sequence[dict[str, str]], specials: re.Pattern[str] | None
) -> tuple[list[dict[str, str]], dict[str, str]]:
    """The conversation with placeholders, and what each stands for. ``specials`` matches special tokens."""
    quoted: dict[str, str] = {}
    turns = [
        {key: value if key == "role" else _quote(value, specials, quoted) for key, value in turn.items()}
        for turn in messages
    ]
    return turns, quoted


def _quote(text: str, specials: re.Pattern[str] | None, quoted: dict[str, str]) -> str:
    if specials is None:
        return text
    return specials.sub(lambda match: _placeholder(match.group(), quoted), text)


def _placeholder(literal: str, quoted: dict[str, str]) -> str:
    for placeholder, known in quoted.items():
        if known == literal:
            return placeholder
    # Unguessable, so that a message cannot contain one.
    placeholder = f"\ue000{secrets.token_hex(8)}\ue001"
    quoted[placeholder] = literal
    return placeholder
