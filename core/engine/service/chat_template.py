"""A model's chat template (Jinja): where it is read from, and how it is compiled and run.

A template is a program that comes with the model; a request can never bring one. The sandbox here keeps it from Python;
what it may cost is limited by the process that it runs in, see :mod:`engine.service.template_child`.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec.structs import astuple, replace

from engine.checkpoint.files import CheckpointError, read_file
from engine.checkpoint.limits import MAX_TEMPLATE_BYTES
from engine.service.message_content import ContentForms, ContentLost
from engine.service.turns import PlainConversation

MAX_GROWTH = 8
"""A prompt may be this many times as long as the text of its messages, plus :data:`SPARE_CHARS`."""
SPARE_CHARS = 65536
REASONING = ("reasoning_content", "thinking", "reasoning")
"""What clients call the reasoning of a message. Templates read the first name, or the second."""
MAX_WORDS = 200
"""Most characters of an error that the template words itself."""


class TemplateFailed(ValueError):
    """The template does not compile, broke a limit, or :class:`TemplateRefused`; the message is for the client."""


class TemplateRefused(TemplateFailed):
    """The template did not take this conversation; it may take others."""


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A template as it comes with a model, not compiled."""

    text: str
    variables: dict[str, str]
    """Names the template may use besides the messages: the tokens that the model has a name for (``bos_token``,
    ``eos_token`` ...)."""

    @classmethod
    def from_directory(cls, directory: Path, configured: Any, variables: dict[str, str]) -> TemplateSource | None:
        """The template of a model in Hugging Face layout; ``None`` if it has none. ``configured``: the
        ``chat_template`` of its ``tokenizer_config.json``.

        Raises :class:`TemplateFailed` for files that are too large.
        """
        own = directory / "chat_template.jinja"
        source = _read_source(own) if os.path.lexists(own) else _default_template(configured)
        if not source:
            return None
        if len(source) > MAX_TEMPLATE_BYTES:
            most = f"at most {MAX_TEMPLATE_BYTES} are read (MAX_TEMPLATE_BYTES)"
            raise TemplateFailed(f"the model's chat template has {len(source)} characters, {most}")
        return cls(source, variables)


class _GenerationTag(Extension):
    """``{% generation %}`` marks assistant text for training; for serving it is only its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders conversations, in the process of :mod:`engine.service.template_child`: nothing here limits time or
    memory. Raises :class:`TemplateFailed` at construction if the source does not compile."""

    def __init__(self, source: TemplateSource) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source.text)
        except MemoryError:
            raise
        except jinja2.TemplateError as error:
            raise TemplateFailed(f"the model's chat template does not compile: {str(error)[:MAX_WORDS]}") from None
        except Exception as error:
            # Jinja makes Python of it: too many nested blocks are a SyntaxError, too many parentheses a RecursionError.
            raise TemplateFailed(f"the model's chat template does not compile: {type(error).__name__}") from None
        self._variables = source.variables
        self._contents = ContentForms(self._tried)

    def render(self, conversation: PlainConversation) -> str:
        """The prompt of a conversation. The content of a message is text or a list of parts, and reaches the template
        as it takes it. Raises :class:`TemplateFailed`, and ``MemoryError``."""
        try:
            given = [self._contents.given(_with_reasoning(message)) for message in conversation.messages]
        except ContentLost as error:
            raise TemplateRefused(str(error)) from None
        prompt = self._first_taken([replace(conversation, messages=each) for each in _spellings(given)])
        if missing := [name for name in _names_of(conversation.tools) if name not in prompt]:
            raise TemplateRefused(f"the chat template leaves out tools: {missing[0][:MAX_WORDS]!r}")
        return prompt

    def _first_taken(self, conversations: list[PlainConversation]) -> str:
        """The prompt of the first that the template takes; it refuses the first one of all if it takes none."""
        refused: TemplateRefused | None = None
        for conversation in conversations:
            try:
                return self._rendered(conversation)
            except TemplateRefused as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def _tried(self, messages: list[dict[str, Any]]) -> str | None:
        try:
            return self._rendered(PlainConversation(messages))
        except TemplateFailed:
            return None

    def _rendered(self, conversation: PlainConversation) -> str:
        limit = max_chars(conversation)
        parts: list[str] = []
        length = 0
        names = {**self._variables, "documents": conversation.documents, **conversation.variables}
        names |= {
            "messages": conversation.messages,
            "tools": conversation.tools,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        try:
            for part in self._template.generate(names):
                parts.append(part)
                length += len(part)
                if length > limit:
                    raise TemplateFailed("the chat template made too much of this conversation")
        except (MemoryError, TemplateFailed):
            raise
        except jinja2.TemplateError as error:
            words = str(error)[:MAX_WORDS]
            raise TemplateRefused(f"the chat template refused this conversation: {words}") from None
        except Exception:
            # Templates are programs: a conversation they did not foresee ends in any of these.
            raise TemplateRefused("the chat template could not handle this conversation") from None
        return "".join(parts)


def max_chars(conversation: PlainConversation) -> int:
    """Most characters that its prompt may have."""
    return SPARE_CHARS + MAX_GROWTH * text_length(astuple(conversation))


def text_length(value: Any) -> int:
    """Characters of the text in lists and mappings."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(text_length, value.values()))
    return sum(map(text_length, value)) if isinstance(value, (list, tuple)) else 0


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    found = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _spellings(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """A conversation as it is, and as some templates want it: the arguments of calls as text instead of an object; what
    the system says later than at the beginning as the user's words."""
    found = [messages]
    if any(message.get("tool_calls") for message in messages):
        found.append([_with_arguments_as_text(message) for message in messages])
    if any(message.get("role") == "system" for message in messages[1:]):
        found += [_with_one_system(each) for each in found]
    return found


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns of the user that follow each other are one: templates that want one system want turns that alternate."""
    found = messages[:1]
    for message in messages[1:]:
        said = message | {"role": "user"} if message.get("role") == "system" else message
        last, (one, other) = found[-1], (found[-1].get("content"), said.get("content"))
        both_speak = last.get("role") == said.get("role") == "user"
        if both_speak and isinstance(one, str) and isinstance(other, str):
            found[-1] = last | {"content": f"{one}\n\n{other}"}
        elif both_speak and isinstance(one, list) and isinstance(other, list):
            found[-1] = last | {"content": [*one, *other]}
        else:
            found.append(said)
    return found


def _with_arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        call | {"function": call["function"] | {"arguments": _to_json(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return message | {"tool_calls": calls} if calls else message


def _names_of(tools: list[dict[str, Any]] | None) -> list[str]:
    return [str(tool["function"]["name"]) for tool in tools or ()]


def _to_json(
    value: Any,
    indent: int | str | None = None,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not any option of json.dumps: those that take a callable would have it called outside the sandbox.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


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
