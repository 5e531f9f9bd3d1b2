"""Slot ``router``: which model, then which engine, external endpoint or stored answer takes this API request?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from engine.contracts.request import SamplingParams

UNIT_BYTES = 4
"""A gateway has no tokenizer: it takes so many bytes of a prompt for a token, and their value for its id."""
ANSWERS = "answers"
"""Capability of routers that give stored answers."""
BLOCK_UNITS = 16
"""Of which so many are a block, as most engines have it."""


@dataclass(frozen=True, slots=True)
class Question:
    """The last turn of a conversation, where it is its user's, is text alone, and no function may be called."""

    text: str
    rest: Any
    """Everything else that the model is given, for a hash: the turns before, the variables of the chat template."""


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A validated API request, before it is fanned out."""

    request_id: str
    kind: str
    """``chat``, ``completion``, ``responses``, ``messages`` or ``ollama``."""
    model: str
    prompts: tuple[tuple[int, ...], ...]
    """Token ids; one or more prompts. At a gateway one, of :data:`UNIT_BYTES`: what follows equal bytes is equal, and
    sizes compare."""
    n: int
    sampling: SamplingParams
    """At a gateway the defaults: see :attr:`fields`."""
    cache_salt: str
    """The tenant. An answer, or a place that holds somebody's prefix, may serve requests of an equal salt alone."""
    stop: tuple[str, ...]
    stream: bool
    echo: bool
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Every field of the body that was given, as plain values, but those that ``prompts`` has.
    Some of them shape the text and nothing else here."""
    fingerprint: str = ""
    """Of the plan of the engines it is for: what another plan answers is another answer. Empty at a gateway."""
    question: Question | None = None
    """How the prompt ends, where that is a question; ``None`` at a gateway."""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """An API request before anything is tokenized, where the name of its model stands for several."""

    request_id: str
    kind: str
    """As :attr:`ApiRequest.kind`."""
    model: str
    """The name that the client used."""
    prompt: Mapping[str, bytes]
    """The fields of the body that a model reads (``messages``, ``tools``, ``prompt``, ``input``, ...), as JSON."""
    fields: Mapping[str, Any]
    """Those of the other fields that are small, as plain values."""


@dataclass(frozen=True, slots=True)
class ModelView:
    """One of the models that a name stands for."""

    name: str
    alive: bool
    """A target that has it takes requests."""
    max_len: int | None = None
    """Tokens of the longest context that one of its targets says it takes; ``None``: not known."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """In which order the models that a name stands for are tried."""

    models: tuple[str, ...]
    """Their names; one that is left out is not tried. At least one."""
    reason: str = ""
    """Why the first one, in a few words: clients see it as ``X-Model-Reason``."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine as a router sees it."""

    engine_id: str
    model: str
    alive: bool
    """It takes requests: it is up, gets on, and is not being drained."""
    running: int
    """Sequences that run, as the engine last said."""
    waiting: int
    """Sequences that wait in the engine, as it last said."""
    kv_used: float
    """Leased blocks / all blocks, 0 to 1, as the engine last said."""
    sequences: int = 0
    """Sequences that were sent there and have not ended, counted where they are sent: unlike what an engine says of
    itself it is never late."""
    queued_tokens: int = 0
    """Prompt tokens of those that have no token yet, without what the router expected to be cached."""
    running_tokens: int = 0
    """Prompt and output tokens of those that have one."""
    block_size: int = 1
    """Tokens of a block, the unit of the prefix cache."""
    starts: int = 1
    """How often the engine was started: a restart has lost what was cached."""


@dataclass(frozen=True, slots=True)
class ToEngine:
    engine_id: str


@dataclass(frozen=True, slots=True)
class Attempts:
    """To one of several engines: the first takes the request. Should it die, or stop taking requests, before the first
    token, the next one does."""

    engines: tuple[str, ...]
    """At least one."""
    reason: str = ""
    """Why the first one, in a few words: it is part of the response's ``timings``."""
    cached_tokens: tuple[int, ...] = ()
    """For each prompt, how many of its tokens the first engine is expected to have cached; empty: none."""


@dataclass(frozen=True, slots=True)
class ToUrl:
    """Pass the request to another OpenAI-compatible server."""

    base_url: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A stored answer: per choice, the output tokens with logprobs and finish reason, as ``finished`` got it."""

    choices: tuple[Mapping[str, Any], ...]
    reason: str = field(default="", compare=False)
    """Why it is given again, in a few words: it is part of the response's ``timings``."""


@dataclass(frozen=True, slots=True)
class Reject:
    status: int
    message: str
    retry_after_s: int | None = None


Route = Attempts | ToEngine | ToUrl | Answer | Reject
"""``ToEngine`` is ``Attempts`` at one engine."""


@runtime_checkable
class Router(Protocol):
    """The plugin; lives in the API process, called on the thread of its event loop: while it decides, nobody is served.
    It must not block; more than 50 ms are logged with its name.

    A plugin whose ``place`` is called ``route`` is taken, too."""

    def place(self, request: ApiRequest, fleet: tuple[EngineView, ...]) -> Route:
        """Decide where the request goes. Pure: what is decided need not come about."""
        ...

    def finished(self, request: ApiRequest, answer: Answer) -> None:
        """The request was answered in full (never called for aborted or failed ones)."""
        ...


@runtime_checkable
class RouterTold(Protocol):
    """A router that wants to know where requests have gone."""

    def begun(self, request: ApiRequest, engine_id: str) -> None:
        """Sequences of the request were sent to an engine: after ``place``, and once more for each engine that takes
        over. With ``place`` of the same request no other one was placed in between."""
        ...


@dataclass(frozen=True, slots=True)
class AnswerTally:
    """What came of stored answers since the start, and what is stored now."""

    hits: int = 0
    """Requests that were given the answer to an equal one."""
    similar_hits: int = 0
    """Requests that were given the answer to a similar one."""
    misses: int = 0
    """Requests that were looked up, and answered by an engine."""
    audits: int = 0
    """Requests with a similar one stored that an engine answered all the same."""
    false_hits: int = 0
    """Audits in which the two answers did not agree."""
    false_rate: tuple[float, float] = (0.0, 1.0)
    """The interval of ``false_hits / audits`` (Wilson, 95 %)."""
    entries: int = 0
    bytes: int = 0
    suspended: bool = False
    """Answers to similar requests are no longer given: too many audits failed."""


@runtime_checkable
class AnswerStore(Protocol):
    """A router that gives stored answers. It ``provides`` :data:`ANSWERS`, so that a gateway, which
    has no tokens, refuses it."""

    def tally(self) -> AnswerTally:
        """Called after :meth:`Router.finished`."""
        ...


@runtime_checkable
class ModelChooser(Protocol):
    """A router that orders the models that a name of a gateway stands for."""

    def choose(self, request: ModelRequest, models: tuple[ModelView, ...]) -> ModelChoice:
        """Decide. Pure, and called before ``place``, which is asked for each model apart. The names alone, as a tuple,
        are a choice without a reason."""
        ...


class PlacedByRoute:
    """A router whose ``place`` is called ``route``."""

    def __init__(self, router: Any) -> None:
        self._router = router

    def place(self, request: ApiRequest, fleet: tuple[EngineView, ...]) -> Route:
        found: Route = self._router.route(request, fleet)
        return found

    def finished(self, request: ApiRequest, answer: Answer) -> None:
        self._router.finished(request, answer)


def placing(router: Any) -> Any:
    """A router as it was built, with ``place`` if it has ``route``."""
    has_route = hasattr(router, "route") and hasattr(router, "finished")
    return PlacedByRoute(router) if has_route and not hasattr(router, "place") else router
