"""What a chat template takes as the content of a message: text, a list of parts, or both. It is tried, by role."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Render = Callable[[list[Message]], str | None]
"""The prompt of a conversation, ``None`` where the template refuses it."""

WORDS = ("qzfirst\nqzline", "qzsecond\nqzline")
"""Words that are looked for in prompts. A line break tells text from a list or JSON that was printed, which escape
it."""
TEXT = WORDS[0]
PARTS = [{"type": "text", "text": words} for words in WORDS]
ROLES = ("user", "system", "assistant")


class ContentLost(ValueError):
    """A content that the template cannot be given; the message says why."""


@dataclass(frozen=True, slots=True)
class Forms:
    """Which forms of a content a prompt shows as they are."""

    text: bool = False
    parts: bool = False
    """It shows all parts of a list."""
    loses: bool = False
    """It shows neither form, not even changed: the template leaves messages of this role out."""


class ContentForms:
    """What one template takes."""

    def __init__(self, render: Render) -> None:
        user = _forms(render, "user", Forms(text=True))
        self._by_role = {"user": user}
        for role in ROLES[1:]:
            found = _forms(render, role, user)
            self._by_role[role] = found if found.text or found.parts else user

    def given(self, message: Message) -> Message:
        """The message with its content as the template takes it. Raises :class:`ContentLost`."""
        role, content = message.get("role"), message.get("content")
        forms = self._by_role.get(str(role), self._by_role["user"])
        if forms.loses and role == "user":
            raise ContentLost("the chat template leaves out what users say")
        if isinstance(content, str):
            takes = forms.text or not forms.parts
            return message if takes else message | {"content": [{"type": "text", "text": content}]}
        if not isinstance(content, list):
            return message
        texts = [_text_of(part) for part in content]
        return message if forms.parts or not forms.text else message | {"content": "\n".join(texts)}


def _text_of(part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ContentLost("a part of a message is no text, and this engine computes text only")
    return str(part["text"])


def _forms(render: Render, role: str, user: Forms) -> Forms:
    text, shown = _tried(render, role, user, TEXT)
    parts, shown_parts = _tried(render, role, user, PARTS)
    return Forms(text, parts, loses=shown is False and shown_parts is False)


def _tried(render: Render, role: str, user: Forms, content: Any) -> tuple[bool, bool | None]:
    """Whether a conversation shows the content as it is, and whether one shows it at all; ``None``: all are refused."""
    sought, shown = WORDS[: 1 if content is TEXT else 2], None
    for conversation in _conversations(role, content, user):
        prompt = render(conversation)
        if prompt is None:
            continue
        if all(words in prompt for words in sought):
            return True, True
        shown = bool(shown) or all(words.partition("\n")[0] in prompt for words in sought)
    return False, shown


def _conversations(role: str, content: Any, user: Forms) -> Iterator[list[Message]]:
    """Conversations that have the content: templates may want a system message, or turns that alternate."""

    def said(by: str, words: str) -> Message:
        as_parts = user.parts and not user.text
        return {"role": by, "content": [{"type": "text", "text": words}] if as_parts else words}

    tried, asked, answered = {"role": role, "content": content}, said("user", "a"), said("assistant", "b")
    system = said("system", "c")
    around: Sequence[tuple[list[Message], list[Message]]] = {
        "user": (([], []), ([system], []), ([asked, answered], []), ([system, asked, answered], [])),
        "system": (([], [asked]),),
        "assistant": (([asked], [asked]), ([asked], []), ([system, asked], [asked])),
    }[role]
    for before, after in around:
        yield [*before, tried, *after]
