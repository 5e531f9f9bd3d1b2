"""The endpoints that generate: one record each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.http.chat_format import ChatFormat
from engine.http.completion_format import CompletionFormat
from engine.http.format import Format
from engine.service.engines import EngineHandle
from engine.service.generation import Generation
from engine.service.job import Job, Prompts
from engine.service.parsing import ParsedChat, ParsedCompletion
from engine.service.prepare import chat_prompts, completion_prompts
from engine.service.tokenizer import Tokenizer

R = TypeVar("R", ParsedChat, ParsedCompletion)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[R]):
    """``request``: what a body is parsed to. ``prompts`` makes tokens of it, for an engine and the client that asks.
    ``format`` writes the answer."""

    path: str
    request: type[R]
    prompts: Callable[[EngineHandle, str, R], Awaitable[Prompts]]
    format: Callable[[Job, Tokenizer, Generation], Format]


CHAT = Endpoint("/v1/chat/completions", ParsedChat, chat_prompts, ChatFormat)
COMPLETIONS = Endpoint("/v1/completions", ParsedCompletion, completion_prompts, CompletionFormat)
ENDPOINTS = (CHAT, COMPLETIONS)
PATHS = frozenset(endpoint.path for endpoint in ENDPOINTS)
