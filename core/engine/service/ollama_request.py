"""The bodies of Ollama's ``/api/chat`` and ``/api/generate``, and the chats that they ask for."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine.service.errors import bad_request
from engine.service.protocol import (
    Body,
    ChatOptions,
    Effort,
    JsonSchemaFormat,
    Message,
    MessageFunction,
    MessageToolCall,
    Penalty,
    ResponseFormat,
    Stops,
    Tool,
    UnitInterval,
)

DEFAULT_TAG = ":latest"
"""Behind the name of a model; here it says nothing."""


class OllamaCall(msgspec.Struct):
    function: MessageFunction


class OllamaMessage(msgspec.Struct):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_name: str | None = None
    tool_calls: list[OllamaCall] | None = None


class ModelOptions(msgspec.Struct):
    """Options that are not listed tell Ollama how to load and run a model, and are without effect."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: UnitInterval | None = None
    min_p: UnitInterval | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=2**31 - 1)] | None = None
    """Most output tokens; below 1: all the room that the prompt leaves."""
    stop: Stops | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class OllamaRequest(Body, kw_only=True):
    verbatim = frozenset({"tools", "format", "messages"})

    stream: bool | None = None
    """``None``: yes."""
    options: ModelOptions | None = None
    format: str | dict[str, Any] | None = None
    """``json`` or a JSON schema."""
    think: bool | Effort | None = None
    keep_alive: str | float | None = None
    """How long Ollama keeps the model loaded. Here it stays."""
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    messages: list[OllamaMessage] = msgspec.field(default_factory=list)
    """None: the model is to be loaded."""
    tools: Annotated[list[Tool], Meta(max_length=512)] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    prompt: str = ""
    """None: the model is to be loaded."""
    system: str | None = None
    images: list[Any] | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[Any] | None = None
    raw: bool | None = None


class OllamaOptions(ChatOptions, kw_only=True):
    """The chat that a request asks for."""

    kind = "ollama"
    id_prefix = "ollama-"
    fits_output = True

    done_reason: Literal["", "load", "unload"] = ""
    """Of a request that asks for no output, but to load or unload the model."""

    @property
    def format_field(self) -> str:
        return "format"

    @property
    def schema_field(self) -> str:
        return "format"


def ollama_chat(request: OllamaChatRequest) -> tuple[OllamaOptions, list[Message]]:
    """Raises :class:`ApiError` ``invalid``."""
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(request.messages)]
    return _options(request, request.tools, bool(messages)), messages


def ollama_generate(request: OllamaGenerateRequest) -> tuple[OllamaOptions, list[Message]]:
    """One turn of a user. Raises :class:`ApiError` ``invalid`` for what would be no chat."""
    for name in ("images", "suffix", "template", "context", "raw"):
        if getattr(request, name):
            raise _unsupported(name)
    system = [Message("system", request.system)] if request.system else []
    return _options(request, None, bool(request.prompt)), [*system, Message("user", request.prompt)]


def _options(request: OllamaRequest, tools: list[Tool] | None, asks: bool) -> OllamaOptions:
    if request.logprobs or request.top_logprobs:
        raise _unsupported("logprobs")
    asked = request.options or ModelOptions()
    return OllamaOptions(
        model=request.model,
        stream=request.stream is not False,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        min_p=asked.min_p,
        seed=asked.seed,
        max_tokens=asked.num_predict if (asked.num_predict or 0) > 0 else None,
        stop=asked.stop,
        repetition_penalty=asked.repeat_penalty,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        think=request.think,
        include_reasoning=request.think not in (False, "none"),
        tools=tools,
        response_format=_format(request.format),
        done_reason="" if asks else "unload" if _is_none(request.keep_alive) else "load",
    )


def _is_none(keep_alive: str | float | None) -> bool:
    """Whether it is no time at all, as a number or with units (``0s``)."""
    return re.fullmatch(r"-?(?:0+(?:\.0*)?(?:[a-z]+|$))+", str(keep_alive)) is not None


def _unsupported(name: str) -> Exception:
    return bad_request(f"{name!r} is not supported by this server; leave it out.", name, "unsupported_parameter")


def _format(asked: str | dict[str, Any] | None) -> ResponseFormat | None:
    if not asked:
        return None
    if isinstance(asked, dict):
        return ResponseFormat("json_schema", JsonSchemaFormat(asked))
    if asked != "json":
        raise bad_request(f"format is {asked[:32]!r}, expected 'json' or a JSON schema.", "format")
    return ResponseFormat("json_object")


def _message(message: OllamaMessage, at: str) -> Message:
    """Calls have no ids there: what a tool said is told by the order."""
    if message.images:
        raise bad_request(f"{at}.images: this server computes text only.", f"{at}.images")
    calls = [MessageToolCall(call.function, f"call_{i}") for i, call in enumerate(message.tool_calls or ())]
    tool = (message.tool_name or "tool") if message.role == "tool" else None
    return Message(
        message.role,
        message.content or "",
        name=message.tool_name,
        reasoning_content=message.thinking,
        tool_calls=calls or None,
        tool_call_id=tool,
    )
