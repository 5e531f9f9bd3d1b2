"""Servers elsewhere that a gateway sends requests to, own ones and providers': what is known of each, and whether it is
given any."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from engine.contracts.config import GatewaySettings, ProviderSettings
from engine.contracts.counters import Reading
from engine.contracts.events import Event
from engine.contracts.router import BLOCK_UNITS, EngineView
from engine.counters.gateway import GatewayCounters
from engine.service.first_byte import FirstByteModel
from engine.service.load import Load

MOST_FAILURES = 3
"""After so many failed requests in a row a target is given none for a while, ready or not."""
PAUSE_S, LONGEST_PAUSE_S = 5.0, 20.0
PROVIDED = ("chat", "completion")
"""What providers are asked for."""
LONGEST_REST_S = 60.0
"""A target that asks for a longer rest is asked again then."""


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
    """The base URL, without a slash at the end."""
    id: str
    """``HOST:PORT``, or a provider's name."""
    key: str | None = field(default=None, repr=False)
    """Its API key."""
    key_env: str | None = None
    """The environment variable that had it."""
    provider: ProviderSettings | None = None
    """``None``: an own one, which is probed."""
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
    first_byte: FirstByteModel = field(default_factory=FirstByteModel)
    rests_until_s: float = 0.0
    """Of the monotonic clock."""
    refusal: str = ""
    """What is wrong with its key, until it has answered a request."""

    @staticmethod
    def at(url: str, key: str | None = None, key_env: str | None = None) -> Target:
        """An own one. ``url``: with or without ``/v1`` at the end."""
        url = url.rstrip("/").removesuffix("/v1")
        return Target(url, urlsplit(url).netloc, key, key_env)

    @staticmethod
    def of(name: str, provider: ProviderSettings, key: str | None = None) -> Target:
        """One that nobody asks whether it is ready, since that may cost something."""
        models: dict[str, Mapping[str, Any]] = {
            here: {"id": here, "object": "model", "owned_by": name} for here in provider.models
        }
        return Target(provider.url.rstrip("/"), name, key, provider.key_env, provider, models, state="ready", starts=1)

    def at_path(self, path: str) -> str:
        """The URL of an endpoint: ``path`` begins with ``/v1`` or is another API's."""
        return self.url + (path if self.provider is None else path.removeprefix("/v1"))

    def name_of(self, model: str) -> str:
        """The name that it has for a model."""
        return model if self.provider is None else self.provider.models[model]

    def answers(self, kind: str) -> bool:
        """Whether it has an endpoint of this kind, as :attr:`engine.contracts.router.ApiRequest.kind`."""
        return self.provider is None or kind in PROVIDED

    def expected_ms(self, tokens: int) -> float | None:
        """When the first byte of a stream is expected that is sent there now, with a prompt of so many tokens that are
        not cached; ``None``: not known."""
        return self.first_byte.ms(self.load.queued_tokens + tokens)

    @property
    def is_due(self) -> bool:
        """It is idle, and what is expected of it was not measured lately: a request tells how long one takes now."""
        return self.load.sequences == 0 and self.first_byte.is_stale

    def refused_key(self, status: int) -> None:
        """It answered 401, 402 or 403: a failure, whose reason is shown."""
        setting = "gateway.key_env" if self.provider is None else f"gateway.providers.{self.id}.key_env"
        what = "a request without a key" if self.key_env is None else f"the key in ${self.key_env}"
        self.refusal = f"refused {what} with {status} ({setting})"
        self.breaker.failed()

    def worked(self) -> None:
        """It answered a request."""
        self.refusal = ""
        self.breaker.worked()

    def rest(self, seconds: float) -> None:
        """It asked for that: ``Retry-After``. A rest that ends later already goes on."""
        self.rests_until_s = max(self.rests_until_s, time.monotonic() + min(seconds, LONGEST_REST_S))

    @property
    def rests_s(self) -> float:
        """For so long it asked to be given nothing."""
        return max(0.0, self.rests_until_s - time.monotonic())

    @property
    def why_not(self) -> str | None:
        """Why it takes no requests; ``None``: it does."""
        if self.state != "ready":
            return self.state
        if self.draining:
            return "draining"
        if rests_s := self.rests_s:
            return f"asked for {rests_s:.0f} s without requests"
        failed = f"failed {self.breaker.failures} requests in a row"
        return (self.refusal or failed) if self.breaker.is_open else None

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

    def max_len(self, model: str) -> int | None:
        """Tokens of the longest context that it says the model takes; ``None``: it does not say."""
        found = self.models.get(model, {}).get("max_model_len")
        return found if isinstance(found, int) else None

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
    not to fail all of them. One that asked for its rest itself has it."""
    able = [target for target in targets if target.takes_requests]
    return able or [one for one in targets if one.state == "ready" and not one.draining and not one.rests_s]


class Targets(dict[str, Target]):
    """All of a gateway's, by id."""

    def __init__(self, settings: GatewaySettings, environ: Mapping[str, str]) -> None:
        """``environ``: has the keys."""
        own = [Target.at(url, _key(settings.key_env, environ), settings.key_env) for url in settings.targets]
        others = [Target.of(name, one, _key(one.key_env, environ)) for name, one in settings.providers.items()]
        super().__init__({target.id: target for target in (*own, *others)})
        self.names = settings.models
        self._counters = GatewayCounters([*self], settings.models)

    @property
    def models(self) -> dict[str, Mapping[str, Any]]:
        """Those of all targets, by name, and the names that stand for some of them."""
        found: dict[str, Mapping[str, Any]] = {}
        for target in self.values():  # own ones first: a provider's entry says less
            for name, model in target.models.items():
                found.setdefault(name, model)
        alias = {"object": "model", "owned_by": "gateway"}
        return found | {name: {"id": name, **alias} for name in self.names if name not in found}

    def serving(self, model: str | None) -> tuple[str, list[str]]:
        """The name of a model as it is known here, and the models that it stands for, in order. ``None``: that of the
        first target. A tag ``:latest``, which clients of Ollama add, is not part of a name. None: nobody has it."""
        if model is None:
            model = next(iter(self.models), "")
        for name in (model, model.removesuffix(":latest")):
            if name in self.names or self.having(name):
                return name, [one for one in self.names.get(name, [name]) if self.having(one)]
        return model, []

    def having(self, model: str) -> list[Target]:
        """Own ones first, then providers."""
        return [target for target in self.values() if model in target.models]

    def count(self, events: Sequence[Event]) -> None:
        """Call on the thread of the event bus."""
        self._counters.add(events)

    @property
    def shed(self) -> int:
        """Requests that the gateway itself refused with 429. Call on the thread of the event bus."""
        return int(self._counters.shed)

    def names_counted(self) -> dict[str, dict[str, dict[str, Any]]]:
        """By name that stands for several models, purpose and model: what came of the gateway's own requests."""
        return {name: counts.by_model() for name, counts in self._counters.names.items()}

    def readings(self) -> list[Reading]:
        return self._counters.readings({one.id: (one.takes_requests, one.load.sequences) for one in self.values()})


def _key(name: str | None, environ: Mapping[str, str]) -> str | None:
    return None if name is None else environ[name]
