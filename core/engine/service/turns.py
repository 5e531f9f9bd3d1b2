"""The turns of a conversation, as chat templates are given them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A part of a content. Text is the only kind so far."""

    text: str


class Turn(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn: who speaks, and what is said. Every string of it but the role is quoted before a template sees it."""

    role: str
    content: str | list[TextPart]
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join([part.text for part in self.content])


def plain_turns(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """As JSON, which is what templates are written for."""
    return [msgspec.to_builtins(turn) for turn in turns]
