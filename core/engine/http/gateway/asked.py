"""A request of a client, as it came in, and what is sent of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from engine.http.bodies import Body
from engine.http.format import Format
from engine.http.gateway.state import Chosen, GatewayState
from engine.http.middleware import REQUEST_ID
from engine.service.admission import Flight
from engine.service.attempts import Attempt
from engine.service.rewriting import rewritten
from engine.service.targets import Target


class Copy:
    """The bytes of an answer that was passed on whole."""

    def __init__(self, most: int) -> None:
        """``most``: of more bytes none are kept."""
        self._most = most
        self._data: bytearray | None = bytearray()

    def add(self, piece: bytes) -> None:
        if self._data is not None:
            self._data += piece
            if len(self._data) > self._most:
                self._data = None

    @property
    def data(self) -> bytes | None:
        return None if self._data is None else bytes(self._data)


@dataclass(frozen=True, slots=True)
class Terms:
    """On which a client is served, by its key."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """That the body gets: what keeps its tenant's caches apart, and its priority."""
    slo_class: str | None = None
    """That own targets are asked for."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, as it came in."""

    http: web.Request
    state: GatewayState
    flight: Flight
    kind: str
    chosen: Chosen
    n: int
    stream: bool
    hides_usage: bool
    """The client does not want it in a stream."""
    terms: Terms
    body: Body
    form: type[Format]
    copy: Copy | None = None
    """Of the answer, for whoever compares it."""

    @property
    def request_id(self) -> str:
        found: str = self.http[REQUEST_ID]
        return found

    def body_for(self, attempt: Attempt) -> bytes:
        target = attempt.target
        model = None if target.provider is None and attempt.model == self.chosen.name else attempt.model
        if model is None and not self.terms.fields:
            return self.body.data
        return body_for(target, self.body.data, model, self.terms.fields, streams=self.stream)


def body_for(
    target: Target, data: bytes, model: str | None, given: Mapping[str, Any], *, streams: bool = False
) -> bytes:
    """The body of a request as a target wants it. ``model``: ``None``: as it is. ``given``: fields that it gets, or
    loses where they are ``None``. ``streams``: a provider's stream shall end with its usage."""
    provider, fields = target.provider, dict(given)
    if model is not None:
        fields["model"] = target.name_of(model)
    drop = {name for name, value in fields.items() if value is None} | {*(() if provider is None else provider.drop)}
    kept = {name: value for name, value in fields.items() if name not in drop}
    usage = provider is not None and streams and "stream_options" not in drop
    return rewritten(data, kept, drop=drop, usage=usage)
