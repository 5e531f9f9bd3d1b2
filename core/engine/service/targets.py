"""Servers elsewhere that a gateway sends requests to: what is known of each, and whether it is given any."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from engine.contracts.counters import Reading
from engine.contracts.events import Event
from engine.contracts.router import BLOCK_UNITS, EngineView
from engine.counters.gateway import GatewayCounters
from engine.service.load import Load

MOST_FAILURES = 3
"""After so many failed requests in a row a target is given none for a while, ready or not."""
PAUSE_S, LONGEST_PAUSE_S = 5.0, 20.0


class Sent(Protocol):
    """A request that was sent to a target."""

    def leave(self) -> None:
        """Go to another target, if one takes requests and nothing has come."""

    def check(self, now_s: float) -> None:
        """End what has been silent for too long. ``now_s``: of the event loop's clock."""


class Breaker:
    """Stops requests to a target that fails them: a moment for the third in a row, twice as long for each further
    one. Those that it was given before, and that fail meanwhile, do not count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until_s = 0.0
        self.failures = 0
        """In a row."""

    @property
    def is_open(self) -> bool:
        """Whether requests are held back."""
        return self._clock() < self._until_s

    def failed(self) -> None:
        if self.is_open:
            return
        self.failures += 1
        if (more := self.failures - MOST_FAILURES) >= 0:
            self._until_s = self._clock() + min(LONGEST_PAUSE_S, PAUSE_S * 2 ** min(more, 10))

    def worked(self) -> None:
        self.failures, self._until_s = 0, 0.0


@dataclass(slots=True, eq=False)
class Target:
    """One server, as the gateway holds it. Use on the event loop's thread only."""

    url: str
    """Without ``/v1`` and without a slash at the end."""
    models: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """By name: what ``/v1/models`` says of each."""
    state: str = "not asked yet"
    """``ready``, or why it is not."""
    draining: bool = False
    """It is given no more requests, and finishes those it has begun."""
    starts: int = 0
    """How often it has become ready: what it had cached before may be gone."""
    load: Load = field(default_factory=Load)
    """What was sent there and has not ended; of tokens as :data:`engine.contracts.router.UNIT_BYTES` says."""
    sendings: set[Sent] = field(default_factory=set)
    breaker: Breaker = field(default_factory=Breaker)

    @staticmethod
    def at(url: str) -> Target:
        return Target(url.rstrip("/").removesuffix("/v1"))

    @property
    def id(self) -> str:
        """``HOST:PORT``"""
        return urlsplit(self.url).netloc

    @property
    def why_not(self) -> str | None:
        """Why it takes no requests; ``None``: it does."""
        if self.state != "ready":
            return self.state
        if self.draining:
            return "draining"
        return f"failed {self.breaker.failures} requests in a row" if self.breaker.is_open else None

    @property
    def takes_requests(self) -> bool:
        return self.why_not is None

    def view(self, model: str, *, alive: bool) -> EngineView:
        """What a router sees of it, for requests of one model. ``alive``: whether it may get one."""
        load = self.load
        return EngineView(
            self.id,
            model,
            alive,
            running=0,
            waiting=0,
            kv_used=0.0,
            sequences=load.sequences,
            queued_tokens=load.queued_tokens,
            running_tokens=load.running_tokens,
            block_size=BLOCK_UNITS,
            starts=self.starts,
        )

    def is_ready(self, models: Mapping[str, Mapping[str, Any]]) -> None:
        """It answers for these models."""
        if self.state != "ready":
            self.state = "ready"
            self.starts += 1
            self.breaker.worked()
        self.models = dict(models)

    def may_exceed(self, other: Target, model: str) -> bool:
        """Whether it may take longer prompts than another one: where one of them does not say, it may."""
        here, there = (target.models.get(model, {}).get("max_model_len") for target in (self, other))
        return not isinstance(here, int) or not isinstance(there, int) or here > there

    def is_down(self, why: str, *, lets_go: bool) -> None:
        """It takes no requests; with ``lets_go`` what it has not begun goes elsewhere."""
        self.state = why
        if lets_go:
            self._let_go()

    def drain(self) -> None:
        """Give it no more requests; what it has not begun goes to another one."""
        self.draining = True
        self._let_go()

    def watch(self, now_s: float) -> None:
        """Have all requests there look at the time."""
        for sending in tuple(self.sendings):
            sending.check(now_s)

    def _let_go(self) -> None:
        for sending in tuple(self.sendings):
            sending.leave()


def taking(targets: Sequence[Target]) -> list[Target]:
    """Those that take requests. Where none does, those that only rest: a rest is there to spare requests a failure,
    not to fail all of them."""
    able = [target for target in targets if target.takes_requests]
    return able or [target for target in targets if target.state == "ready" and not target.draining]


class Targets(dict[str, Target]):
    """All of a gateway's, by id."""

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__({target.id: target for target in map(Target.at, urls)})
        self._counters = GatewayCounters([*self])

    @property
    def models(self) -> dict[str, Mapping[str, Any]]:
        """Those of all targets, by name."""
        return {name: model for target in self.values() for name, model in target.models.items()}

    def serving(self, model: str | None) -> tuple[str, list[Target]]:
        """The name of a model as targets call it, and those that have it. ``None``: that of the first target. A tag
        ``:latest``, which clients of Ollama add, is not part of a name. No targets: nobody has it."""
        if model is None:
            model = next(iter(self.models), "")
        for name in (model, model.removesuffix(":latest")):
            if found := [target for target in self.values() if name in target.models]:
                return name, found
        return model, []

    def count(self, events: Sequence[Event]) -> None:
        """Call on the thread of the event bus."""
        self._counters.add(events)

    def readings(self) -> list[Reading]:
        return self._counters.readings({one.id: (one.takes_requests, one.load.sequences) for one in self.values()})
