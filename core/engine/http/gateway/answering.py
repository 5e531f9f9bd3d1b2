"""A request comes in at a gateway: read, its models chosen, and passed on."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from aiohttp import web

from engine.contracts.request import SamplingParams
from engine.contracts.router import ApiRequest
from engine.http.endpoints import Endpoint
from engine.http.gateway.asked import Asked, Terms
from engine.http.gateway.passing import Passing
from engine.http.gateway.state import gateway_of
from engine.http.gateway.tiers import TIERS
from engine.http.gateway.usage import asks_for_usage
from engine.http.incoming import arrival_of, caller_of, client_of, entered
from engine.http.middleware import REQUEST_ID
from engine.service.attempts import Order
from engine.service.errors import bad_request
from engine.service.keys import Caller, priority_for, salt_for
from engine.service.peek import Peek, peek
from engine.service.promises import HEADER, passed_on


async def answer(endpoint: Endpoint[Any], kind: str, http: web.Request) -> web.StreamResponse:
    """Have a target answer."""
    received_s = time.monotonic()
    state, tiers = gateway_of(http), http.app[TIERS]
    state.admission.gate(client_of(http))
    caller = caller_of(http)
    slo_class = passed_on(caller, http.headers.get(HEADER))
    async with state.bodies.read(http) as body:
        peeked = peek(body.data, endpoint.prompt, streams=endpoint.streams)
        with entered(http, peeked.user, peeked.n) as flight:
            chosen = state.serving(http[REQUEST_ID], kind, peeked)
            api = _as_routers_see_it(http, kind, chosen.name, peeked)
            terms = Terms({} if caller is None else _of_key(caller, api), slo_class)
            if (cascade := tiers.cascades.get(chosen.name)) is not None:
                chosen = await cascade.choose(state, api, chosen, body.data, terms)
            shadows = tiers.shadows.get(chosen.name)
            drawn = None if shadows is None else shadows.draw(api, body.data, terms)
            patience_s = state.gateway.patience_s
            order = Order(api, chosen.models, state, patience_s=patience_s, clock=asyncio.get_running_loop().time)
            if peeked.goes_on and len(order.targets) > 1:
                raise bad_request(
                    "Responses are stored at the target that made them, and this gateway has several; send the whole "
                    "conversation instead.",
                    "previous_response_id",
                )
            hides_usage = not asks_for_usage(peeked.fields)
            form, stream = endpoint.format, peeked.stream
            copy = None if drawn is None else drawn.copy
            asked = Asked(http, state, flight, kind, chosen, peeked.n, stream, hides_usage, terms, body, form, copy)
            del peeked, api  # they hold the prompt
            passing = Passing(asked, order, arrival_of(http, received_s, time.monotonic()))
            response = await passing.answer()
            if shadows is not None and drawn is not None and passing.answered_by is not None:
                shadows.follow(state, drawn, passing.answered_by)
            return response


def _as_routers_see_it(http: web.Request, kind: str, model: str, peeked: Peek) -> ApiRequest:
    return ApiRequest(
        request_id=http[REQUEST_ID],
        kind=kind,
        model=model,
        prompts=(peeked.prompt,),
        n=peeked.n,
        sampling=SamplingParams(),
        cache_salt=salt_for(caller_of(http), peeked.cache_salt),
        stop=(),
        stream=peeked.stream,
        echo=False,
        fields=peeked.fields,
    )


def _of_key(caller: Caller, api: ApiRequest) -> dict[str, Any]:
    """Fields that the bodies of a key's requests get. Raises :class:`ApiError` ``invalid`` for a priority that it may
    not have; what is no number is for the server to refuse."""
    fields: dict[str, Any] = {"cache_salt": api.cache_salt}
    asked = api.fields.get("priority")
    if caller.priority is not None and isinstance(asked, int | None):
        fields["priority"] = priority_for(caller, asked)
    return fields
