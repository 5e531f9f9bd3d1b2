"""A request of a client, as it came in, and what is sent of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiohttp import web

from engine.http.bodies import Body
from engine.http.format import Format
from engine.http.gateway.state import Chosen, GatewayState
from engine.http.middleware import REQUEST_ID
from engine.service.admission import Flight
from engine.service.attempts import Attempt
from engine.service.rewriting import rewritten


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
    salt: str | None
    """What keeps its tenant's caches apart; ``None``: what the client sent."""
    body: Body
    form: type[Format]

    @property
    def request_id(self) -> str:
        found: str = self.http[REQUEST_ID]
        return found

    def body_for(self, attempt: Attempt) -> bytes:
        provider, fields = attempt.target.provider, dict[str, Any]()
        if provider is not None or attempt.model != self.chosen.name:
            fields["model"] = attempt.target.name_of(attempt.model)
        if self.salt is not None:
            fields["cache_salt"] = self.salt
        if not fields:
            return self.body.data
        drop = () if provider is None else provider.drop
        fields = {name: value for name, value in fields.items() if name not in drop}
        usage = provider is not None and self.stream and "stream_options" not in drop
        return rewritten(self.body.data, fields, drop=drop, usage=usage)
