"""The endpoints that generate: one record each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, get_type_hints

from engine.http.chat_format import ChatFormat
from engine.http.completion_format import CompletionFormat
from engine.http.errors import ErrorBody, error_body
from engine.http.format import Format
from engine.http.messages_format import MessagesFormat, messages_error
from engine.http.ollama_format import OllamaChatFormat, OllamaGenerateFormat, ollama_error
from engine.http.responses_format import ResponsesFormat
from engine.service.engines import EngineHandle
from engine.service.job import Prompts
from engine.service.parsing import (
    ParsedChat,
    ParsedCompletion,
    ParsedMessages,
    ParsedOllamaChat,
    ParsedOllamaGenerate,
    ParsedResponses,
)
from engine.service.prepare import chat_prompts, completion_prompts
from engine.service.responses_request import self_contained

R = TypeVar("R", ParsedChat, ParsedCompletion, ParsedResponses, ParsedMessages, ParsedOllamaChat, ParsedOllamaGenerate)


def unchanged(body: bytes) -> bytes:
    return body


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[R]):
    """``request``: what a body is parsed to. ``prompts`` makes tokens of it, for an engine and the client that asks.
    ``format`` writes the answer. ``prompt``: the fields of a body that a model reads, in that order. ``passed_on``: the
    body as another server is sent it. ``streams``: unless the body says otherwise."""

    path: str
    request: type[R]
    prompts: Callable[[EngineHandle, str, R], Awaitable[Prompts]]
    format: type[Format]
    prompt: tuple[str, ...]
    passed_on: Callable[[bytes], bytes] = unchanged
    streams: bool = False

    @property
    def kind(self) -> str:
        """As :attr:`engine.contracts.router.ApiRequest.kind`."""
        found: str = get_type_hints(self.request)["options"].kind
        return found


CHAT = Endpoint("/v1/chat/completions", ParsedChat, chat_prompts, ChatFormat, ("tools", "messages"))
COMPLETIONS = Endpoint("/v1/completions", ParsedCompletion, completion_prompts, CompletionFormat, ("prompt",))
RESPONSES = Endpoint(
    "/v1/responses", ParsedResponses, chat_prompts, ResponsesFormat, ("instructions", "tools", "input"), self_contained
)
MESSAGES = Endpoint("/v1/messages", ParsedMessages, chat_prompts, MessagesFormat, ("tools", "system", "messages"))
OLLAMA_CHAT = Endpoint(
    "/api/chat", ParsedOllamaChat, chat_prompts, OllamaChatFormat, ("tools", "messages"), streams=True
)
OLLAMA_GENERATE = Endpoint(
    "/api/generate", ParsedOllamaGenerate, chat_prompts, OllamaGenerateFormat, ("system", "prompt"), streams=True
)
ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE)
PATHS = frozenset(endpoint.path for endpoint in ENDPOINTS)


def error_body_of(path: str) -> ErrorBody:
    """How errors look to the clients of a path."""
    if path.startswith("/api/"):
        return ollama_error
    return messages_error if path == MESSAGES.path or path.startswith(MESSAGES.path + "/") else error_body
