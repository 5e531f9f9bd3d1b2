"""Router ``tiered``: at a gateway, short and simple conversations go to the small one of several models.

A name of ``gateway.models`` stands for two or more models, from the smallest to the largest. The rule looks at how a
conversation begins, up to and with its first turn of the user, so that all its turns go to one model, which has them in
its prefix cache:

* fewer than ``router.small_tokens`` tokens, and simple: the first model;
* with three models, fewer than ``router.medium_tokens``: the second;
* otherwise the last.

A token is taken to be four bytes. *Simple* is what has no tools, no grammar or schema, no content but text, no code and
no maths (:data:`CODE`, :data:`MATHS`). Length says what a model has room for and signs say what it is about; neither
says how hard a question is. A model that is known to be too short for the whole prompt is passed over. Where the model
fails, larger ones are tried before smaller ones.

Among the engines of each model requests are placed as router ``prefix`` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.contracts.config import at_least
from engine.contracts.provider import BuildContext
from engine.contracts.router import UNIT_BYTES, ModelChoice, ModelRequest, ModelView
from engine_plugins.router.prefix import PrefixConfig, PrefixRouter

CODE = re.compile(
    r"```|[;{}][ \t]*$|^[ \t]*(?:def|class|import|from|function|const|let|var|public|private|return)\b.{1,200}[:;({]"
    r"|^[ \t]*#include|\bSELECT\b.{1,200}\bFROM\b|</\w{1,40}>|\w\([^)\n]{0,200}\)[ ]?(?:=>|->|\{)",
    re.MULTILINE,
)
"""A fence, a line that ends as statements do, declarations, SQL, markup."""
MATHS = re.compile(
    r"\$[^$\n]{1,200}\$|\\(?:frac|sum|int|sqrt|begin)\b|\d\s*[-+*/^=<>]\s*\(?\d|\b[a-z]\s*=\s*[-(\d]"
    r"|\b(?:integral|derivative|equation|prove|proof|theorem|matrix)\b",
    re.IGNORECASE,
)
"""TeX, sums of numbers, equations, words of proofs."""
SHAPES = (
    "functions", "tool_choice", "response_format", "structured_outputs", "text", "format", "grammar",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip
"""Fields that demand a shape of the answer."""
NO_SHAPE: tuple[Any, ...] = (None, [], {}, "none", "auto", {"type": "text"}, {"format": {"type": "text"}})
"""Values of these that demand nothing."""
MEDIA = ("image_url", "image", "input_image", "input_audio", "audio", "input_file", "file", "document", "video_url")
"""Types of content that is no text."""
CONVERSATION = ("messages", "input")
MOST_READ_BYTES = 512 * 1024
"""A longer prompt goes to the last model unread: reading it would keep others waiting."""
MOST_BEGINNING_BYTES = 128 * 1024
"""So does one with a longer beginning: of JSON that is all brackets, a megabyte takes a fifth of a second."""
MOST_TURNS = 1000
"""Of a beginning."""


class _Turn(msgspec.Struct, gc=False):
    """As it was written."""

    role: msgspec.Raw = msgspec.Raw(b"null")
    content: msgspec.Raw = msgspec.Raw(b"null")


_turns = msgspec.json.Decoder(list[_Turn])


@dataclass(frozen=True)
class TieredConfig(PrefixConfig):
    """From which length on a conversation goes to which model."""

    small_tokens: int = 500
    """The first model gets simple conversations that begin with fewer."""
    medium_tokens: int = 4000
    """The second of three models gets others that begin with fewer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("router.small_tokens", self.small_tokens, 0)
        at_least("router.medium_tokens", self.medium_tokens, self.small_tokens)


class TieredRouter(PrefixRouter):
    """The plugin. It keeps nothing of conversations."""

    def __init__(self, config: TieredConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self._small = config.small_tokens
        self._medium = config.medium_tokens

    def choose(self, request: ModelRequest, models: tuple[ModelView, ...]) -> ModelChoice:
        last = len(models) - 1
        whole = sum(map(len, request.prompt.values()))
        begins = beginning(request.prompt) if whole <= MOST_READ_BYTES else []
        size = sum(map(_tokens, begins)) or whole // UNIT_BYTES
        if size < self._small and is_simple(request.prompt, request.fields, begins):  # signs of a long one cost time
            tier, reason = 0, "short and simple"
        elif size < self._small or (last > 1 and size < self._medium):
            tier = min(1, last) if last > 1 else last
            reason = "not simple" if size < self._small else "of medium length"
        else:
            tier, reason = last, "long"
        while tier < last and whole // UNIT_BYTES > (models[tier].max_len or whole):
            tier, reason = tier + 1, f"too long for {models[tier].name}"
        names = [model.name for model in models]
        return ModelChoice((*names[tier:], *reversed(names[:tier])), reason)


def beginning(prompt: Mapping[str, bytes]) -> list[str]:
    """The texts of a conversation up to and with the first turn of its user; all of a prompt that is none. None of what
    is too much to read."""
    parts = list[bytes]()
    for name, data in prompt.items():
        parts += first_turns(data) if name in CONVERSATION else [data]
    if sum(map(len, parts)) > MOST_BEGINNING_BYTES:
        return []
    return [text for part in parts for text in texts_in(_decoded(part))]


def first_turns(data: bytes) -> list[bytes]:
    """What turns say, up to and with the first one of the user; ``data`` itself where that is no list of turns."""
    try:
        turns = _turns.decode(data)[:MOST_TURNS]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [data]
    ends = (count for count, turn in enumerate(turns, 1) if bytes(turn.role) == b'"user"')
    return [bytes(turn.content) for turn in turns[: next(ends, len(turns))]]


def texts_in(value: Any) -> Iterator[str]:
    """All strings in JSON, from the outside in."""
    found = [value]
    while found:
        one = found.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, list):
            found += one
        elif isinstance(one, dict):
            found += one.values()


def is_simple(prompt: Mapping[str, bytes], fields: Mapping[str, Any], begins: list[str]) -> bool:
    """Whether nothing of it hints at more than a question: see the module."""
    shapes = any(fields.get(name) not in NO_SHAPE for name in SHAPES)
    tools = prompt.get("tools", b"[]") not in (b"[]", b"{}", b"null")
    signs = any(text in MEDIA or CODE.search(text) or MATHS.search(text) for text in begins)
    return not (shapes or tools or signs)


def _decoded(data: bytes) -> Any:
    """``None`` for what nobody can read: the server that gets it says so."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _tokens(text: str) -> int:
    return len(text.encode(errors="replace")) // UNIT_BYTES + 1
