"""A model's chat template (Jinja), compiled once and run in a sandbox with limits.

The template comes with the model; a request can never bring one. What a request brings, its messages, is marked where
it spells a special token, so that the tokenizer can tell quoted text from structure.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.checkpoint.files import CheckpointError, read_file, read_json
from engine.checkpoint.limits import MAX_TEMPLATE_BYTES, MAX_TOKENIZER_CONFIG_BYTES

MAX_GROWTH = 8
"""A prompt may be this many times as long as the text of its messages, plus :data:`SPARE_CHARS`."""
SPARE_CHARS = 65536
MAX_SECONDS = 1.0


class TemplateFailed(ValueError):
    """The template refused the conversation or broke a limit; the message is for the client."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt. ``quoted`` maps placeholders in ``text`` to special tokens that a message merely spells."""

    text: str
    quoted: dict[str, str] = field(default_factory=dict)

    def unquote(self, piece: str) -> str:
        for placeholder, literal in self.quoted.items():
            piece = piece.replace(placeholder, literal)
        return piece


class _GenerationTag(Extension):
    """``{% generation %}`` marks assistant text for training; for serving it is only its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders conversations. Raises :class:`TemplateFailed` at construction if the source does not compile."""

    def __init__(self, source: str, variables: dict[str, str] | None = None) -> None:
        """``variables``: names the template may use besides the messages (``bos_token``, ``eos_token`` ...)."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateFailed(f"the model's chat template does not compile: {error}") from None
        self._variables = variables or {}

    @classmethod
    def from_directory(cls, directory: Path) -> ChatTemplate | None:
        """The template of a model in Hugging Face layout; ``None`` if it has none.

        Raises :class:`TemplateFailed` for one that does not compile, or a ``tokenizer_config.json`` that is not JSON.
        """
        config = _read_config(directory / "tokenizer_config.json")
        own = directory / "chat_template.jinja"
        source = _read_source(own) if os.path.lexists(own) else _default_template(config.get("chat_template"))
        if not source:
            return None
        if len(source) > MAX_TEMPLATE_BYTES:
            most = f"at most {MAX_TEMPLATE_BYTES} are read (MAX_TEMPLATE_BYTES)"
            raise TemplateFailed(f"the model's chat template has {len(source)} characters, {most}")
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        return cls(source, {name: _token_text(config.get(name)) for name in names})

    def render(
        self, messages: Sequence[dict[str, str]], add_generation_prompt: bool, specials: re.Pattern[str] | None = None
    ) -> Rendered:
        """The prompt of a conversation. ``specials`` matches special tokens. Raises :class:`TemplateFailed`."""
        quoted: dict[str, str] = {}
        turns = [
            {key: value if key == "role" else _quote(value, specials, quoted) for key, value in turn.items()}
            for turn in messages
        ]
        limit = SPARE_CHARS + MAX_GROWTH * sum(len(value) for turn in turns for value in turn.values())
        deadline = time.monotonic() + MAX_SECONDS
        parts: list[str] = []
        length = 0
        try:
            for part in self._template.generate(
                **self._variables, messages=turns, tools=None, add_generation_prompt=add_generation_prompt
            ):
                parts.append(part)
                length += len(part)
                if length > limit or time.monotonic() > deadline:
                    raise TemplateFailed("the chat template made too much of this conversation")
        except jinja2.TemplateError as error:
            raise TemplateFailed(f"the chat template refused this conversation: {str(error)[:200]}") from None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            if isinstance(error, TemplateFailed):
                raise
            # Templates are programs: a conversation they did not foresee ends in any of these.
            raise TemplateFailed("the chat template could not handle this conversation") from None
        return Rendered("".join(parts), quoted)


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


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _read_config(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        return {}
    try:
        return read_json(path, MAX_TOKENIZER_CONFIG_BYTES, "MAX_TOKENIZER_CONFIG_BYTES")
    except CheckpointError as error:
        raise TemplateFailed(str(error)) from None


def _read_source(path: Path) -> str:
    try:
        return read_file(path, MAX_TEMPLATE_BYTES, "MAX_TEMPLATE_BYTES").decode()
    except (CheckpointError, UnicodeDecodeError) as error:
        raise TemplateFailed(f"{path.name}: {error}") from None


def _default_template(entry: Any) -> str:
    """``chat_template`` is a template, or a list of named ones of which ``default`` is meant."""
    if isinstance(entry, list):
        named = (item for item in entry if isinstance(item, dict))
        entry = next((item.get("template") for item in named if item.get("name") == "default"), "")
    return entry if isinstance(entry, str) else ""


def _token_text(entry: Any) -> str:
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""
