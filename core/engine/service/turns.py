"""Conversations: what a chat template makes a prompt of, typed, and as the JSON that templates are written for."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engine.contracts.router import Question

Role = Literal["system", "user", "assistant", "tool"]


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A part of a content. Text is the only kind."""

    text: str


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any]
    """Values by the names of the function's parameters."""


class ToolCall(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    """A call that an assistant asked for."""

    id: str
    function: FunctionCall


class Turn(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn: who speaks, and what is said."""

    role: Role
    content: str | list[TextPart]
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    """Calls that an assistant asked for."""
    tool_call_id: str | None = None
    """The call that the content of a tool answers."""

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join([part.text for part in self.content])


class Breakpoint(msgspec.Struct, frozen=True):
    """Where a beginning of a prompt ends that is to stay cached."""

    turn: int
    """The last turn of it; -1: there are only tools."""
    chars: int | None
    """So much of that turn's text; ``None``: all of the turn, its calls included."""
    seconds: float


class Conversation(msgspec.Struct, frozen=True):
    """Everything that a chat template is given."""

    turns: tuple[Turn, ...]
    add_generation_prompt: bool = True
    """The prompt ends where the assistant begins to speak."""
    variables: dict[str, Any] = {}
    """More names for the template, with any JSON."""
    tools: tuple[dict[str, Any], ...] | None = None
    """Functions that the assistant may call, as JSON schemas."""
    documents: tuple[dict[str, Any], ...] | None = None
    """Texts to answer from. Requests bring theirs in ``variables``."""
    breakpoints: tuple[Breakpoint, ...] = ()
    """In the order of the prompt. The template is not told."""

    def plain(self) -> PlainConversation:
        """The conversation as templates see it."""
        return PlainConversation(
            [msgspec.to_builtins(turn) for turn in self.turns],
            self.add_generation_prompt,
            self.variables,
            None if self.tools is None else list(self.tools),
            None if self.documents is None else list(self.documents),
        )


class PlainConversation(msgspec.Struct, frozen=True):
    """A :class:`Conversation` as JSON."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    variables: dict[str, Any] = {}
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None


def question_of(conversation: Conversation) -> Question | None:
    """``None`` where the user does not speak last, or functions may be called."""
    if conversation.tools or not conversation.turns or conversation.turns[-1].role != "user":
        return None
    *earlier, last = conversation.turns
    turns = (*earlier, msgspec.structs.replace(last, content=""))
    return Question(last.text, msgspec.structs.replace(conversation, turns=turns, breakpoints=()))
