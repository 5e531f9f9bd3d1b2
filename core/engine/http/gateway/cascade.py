"""A smaller model answers only where the beginning of its answer shows confidence; where not, the next larger one does.

The look is a request of its own: the client's, greedy, for a few tokens with their log probabilities. Whatever it does
not show counts as no confidence. The model that answers begins anew, the smaller one with the prompt in its prefix
cache. So a look costs those tokens once more, and nothing that is passed on has to be held back, or have log
probabilities taken out that the client did not ask for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from engine.assembly.errors import AssemblyError
from engine.contracts.config import CascadeSettings
from engine.contracts.events import OwnRequestEvent
from engine.contracts.router import ApiRequest
from engine.http.gateway.asked import Terms, body_for
from engine.http.gateway.own_requests import NotAnswered, ask
from engine.http.gateway.state import Chosen, GatewayState
from engine.http.gateway.usage import cost_of, usage_of
from engine.service.confidence import confidence, read_calibration
from engine.service.logs import Repeated
from engine.service.targets import Target, taking


class _Token(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class Cascade:
    """Of one name."""

    def __init__(self, name: str, settings: CascadeSettings, models: list[str]) -> None:
        """``models``: that the name stands for. Raises :class:`AssemblyError`."""
        key = f"gateway.cascade.{name}"
        table = read_calibration(f"{key}.table", settings.table)
        if table.model not in models[:-1] or table.reference not in models:
            both = f"{table.model} and {table.reference}"
            raise AssemblyError([f"{key}.table={settings.table} is of {both}, expected models of {name}: {models}"])
        threshold = table.threshold(settings.agreement)
        if threshold is None:
            best = table.agreement[-1][1]
            raise AssemblyError([f"{key}.agreement={settings.agreement}: {settings.table} reaches {best:.3f} at most"])
        self.settings = settings
        self.table = table
        self.threshold = threshold
        """Of confidence."""
        self._no_logprobs = Repeated("a cascade's model gives no log probabilities: the next larger one answers all")

    async def choose(self, state: GatewayState, api: ApiRequest, chosen: Chosen, data: bytes, terms: Terms) -> Chosen:
        """The models in the order in which they are tried after a look, if there is one. ``data``: the body."""
        model, *others = chosen.models
        is_looked_at = api.kind == "chat" and api.n == 1 and (self.settings.streams or not api.stream)
        if model != self.table.model or not others or not is_looked_at:
            return chosen
        look = await self._look(state, replace(api, model=model), chosen.models[model], data, terms)
        event = OwnRequestEvent(
            time.monotonic(), api.request_id, "look", look.result, chosen.name, model, look.server, look.cost
        )
        state.bus.publish((event,))
        if look.result == "confident":
            return replace(chosen, reason=look.reason)
        models = {name: chosen.models[name] for name in (*others, model)}
        return Chosen(chosen.name, models, f"{model}: {look.reason}")

    async def _look(
        self, state: GatewayState, api: ApiRequest, targets: list[Target], data: bytes, terms: Terms
    ) -> Look:
        if (target := _placed(state, api, targets)) is None:
            return Look("failed", "no target takes requests")
        fields: dict[str, Any] = {**terms.fields, "stream": False, "stream_options": None, "temperature": 0}
        fields |= {"logprobs": True, "top_logprobs": None}
        body = body_for(target, data, api.model, fields | _limited(api, self.table.tokens))
        assert state.session is not None
        try:
            found = await ask(
                state.session, state.gateway, target, body, len(api.prompts[0]),
                f"{api.request_id}-look", self.settings.limit_s, terms.slo_class,
            )  # fmt: skip
        except NotAnswered as error:
            if error.is_failure:
                target.breaker.failed()
            return Look("failed", str(error), target.id)
        cost = cost_of(usage_of(found), target.provider)
        logprobs = logprobs_of(found)
        if logprobs is None:
            self._no_logprobs.warning(model=api.model, target=target.id, request_id=api.request_id)
            return Look("no_logprobs", "no log probabilities", target.id, cost)
        if not logprobs:
            return Look("unsure", "an answer without tokens", target.id, cost)
        value = confidence(logprobs, self.table.quantile)
        sure = value >= self.threshold
        reason = f"confidence {value:.2f}, {'at least' if sure else 'below'} {self.threshold:.2f}"
        return Look("confident" if sure else "unsure", reason, target.id, cost)


@dataclass(frozen=True, slots=True)
class Look:
    """What one showed."""

    result: str
    """As :attr:`OwnRequestEvent.result`."""
    reason: str
    server: str = ""
    cost: float = 0.0


def logprobs_of(data: bytes) -> list[float] | None:
    """Of the tokens of an answer's first choice; ``None``: it says none."""
    try:
        logprobs = msgspec.json.decode(data, type=_Answer).choices[0].logprobs
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError):
        return None
    tokens = None if logprobs is None else logprobs.content
    return None if tokens is None else [token.logprob for token in tokens]


def _placed(state: GatewayState, api: ApiRequest, targets: list[Target]) -> Target | None:
    """Where the router sends the request, as it will send what follows; a provider where no own target takes any.
    Raises :class:`ApiError` as the router."""
    if own := taking([target for target in targets if target.provider is None]):
        target = state.targets[state.place(api, own).engines[0]]
        state.begun(api, target.id)
        return target
    return next(iter(taking(targets)), None)


def _limited(api: ApiRequest, tokens: int) -> dict[str, int]:
    """So many tokens at most, by the field that the client used; fewer where it asked for fewer."""
    name = "max_completion_tokens" if api.fields.get("max_completion_tokens") is not None else "max_tokens"
    given = api.fields.get(name)
    return {name: min(given, tokens) if isinstance(given, int) and given > 0 else tokens}
