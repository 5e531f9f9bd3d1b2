"""Slot ``router``: which engine, external endpoint or stored answer takes this API request?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from engine.contracts.request import SamplingParams


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A validated API request, before it is fanned out."""

    request_id: str
    kind: str
    """``chat``, ``completion``, ``responses``, ``messages`` or ``ollama``."""
    model: str
    prompts: tuple[tuple[int, ...], ...]
    """Token ids; one or more prompts."""
    n: int
    sampling: SamplingParams
    cache_salt: str
    """The tenant. An answer, or a place that holds somebody's prefix, may serve requests of an equal salt alone."""
    stop: tuple[str, ...]
    stream: bool
    echo: bool
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Every field of the body that was given, as plain values, but those that ``prompts`` has.
    Some of them shape the text and nothing else here."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine as a router sees it."""

    engine_id: str
    model: str
    alive: bool
    running: int
    waiting: int
    kv_used: float


@dataclass(frozen=True, slots=True)
class ToEngine:
    engine_id: str


@dataclass(frozen=True, slots=True)
class ToUrl:
    """Pass the request to another OpenAI-compatible server."""

    base_url: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A stored answer: per choice, the output tokens with logprobs and finish reason, as ``finished`` got it."""

    choices: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Reject:
    status: int
    message: str
    retry_after_s: int | None = None


Route = ToEngine | ToUrl | Answer | Reject


@runtime_checkable
class Router(Protocol):
    """The plugin; lives in the API process, called on the thread of its event loop: while it decides, nobody is served.
    It must not block; more than 50 ms are logged with its name."""

    def route(self, request: ApiRequest, fleet: tuple[EngineView, ...]) -> Route:
        """Decide where the request goes."""
        ...

    def finished(self, request: ApiRequest, answer: Answer) -> None:
        """The request was answered in full (never called for aborted or failed ones)."""
        ...
