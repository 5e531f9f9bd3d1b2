"""``GET`` and ``DELETE /v1/responses/{id}``, ``GET /v1/responses/{id}/input_items``: responses that are stored.

``?user=`` and ``?cache_salt=`` say whose, as the fields of those names did in the request.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from engine.http.bodies import json_response
from engine.http.incoming import state_of, tenant_of
from engine.service.errors import bad_request
from engine.service.response_store import StoredTurn, Tenant, joined_items

MOST_ITEMS = 100
DEFAULT_ITEMS = 20


async def one_response(http: web.Request) -> web.StreamResponse:
    if http.query.get("stream") == "true":
        raise bad_request("stream=true is not supported here: the response has ended.", "stream")
    return web.Response(body=_found(http).record.response, content_type="application/json")


async def delete_response(http: web.Request) -> web.StreamResponse:
    """Responses that went on from it keep what was said."""
    name = http.match_info["response"]
    state_of(http).responses.forget(name, _tenant(http))
    return json_response({"id": name, "object": "response", "deleted": True})


async def input_items(http: web.Request) -> web.StreamResponse:
    """The items that the model was given, those of the responses before included; the last first, or ``?order=asc``.
    ``?limit=`` of them, ``?after=`` the item of this id."""
    turn = _found(http)
    limit, order = http.query.get("limit", str(DEFAULT_ITEMS)), http.query.get("order", "desc")
    if not limit.isascii() or not limit.isdigit() or len(limit) > 3 or not 0 < int(limit) <= MOST_ITEMS:
        raise bad_request(f"limit={limit[:16]!r}: expected a number from 1 to {MOST_ITEMS}.", "limit")
    if order not in ("asc", "desc"):
        raise bad_request(f"order={order[:16]!r}: expected asc or desc.", "order")
    # A long conversation may have a hundred thousand items.
    return json_response(await asyncio.to_thread(_page, turn, int(limit), order == "asc", http.query.get("after")))


def _page(turn: StoredTurn, limit: int, is_ascending: bool, after: str | None) -> dict[str, Any]:
    """Raises :class:`ApiError` ``invalid`` where there is no item ``after``."""
    digits = turn.record.name.partition("_")[2]
    given = msgspec.json.decode(joined_items(turn.given()), type=list[msgspec.Raw])
    items = [*enumerate(given)] if is_ascending else [*enumerate(given)][::-1]
    if after is not None:
        at = next((i for i, (place, item) in enumerate(items) if _about(item, digits, place).id == after), None)
        if at is None:
            raise bad_request(f"after={after[:64]!r}: there is no such item.", "after")
        items = items[at + 1 :]
    shown = [_listed(item, _about(item, digits, place)) for place, item in items[:limit]]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"object": "list", "data": shown, **ends, "has_more": len(items) > len(shown)}


def _found(http: web.Request) -> StoredTurn:
    return state_of(http).responses.find(http.match_info["response"], _tenant(http))


def _tenant(http: web.Request) -> Tenant:
    return tenant_of(http, http.query.get("user"), http.query.get("cache_salt"))


class _About(msgspec.Struct):
    id: str | None = None
    type: str | None = None


def _about(item: msgspec.Raw, digits: str, place: int) -> _About:
    """Items that came without an id have one by their place."""
    found = msgspec.json.decode(item, type=_About)
    kind = found.type or "message"
    return _About(found.id or f"{'msg' if kind == 'message' else 'item'}_{digits}_in{place}", kind)


def _listed(item: msgspec.Raw, about: _About) -> dict[str, Any]:
    """An item as the API lists it: with an id, and with parts for its text."""
    found: dict[str, Any] = msgspec.json.decode(item) | {"id": about.id, "type": about.type}
    if about.type == "message" and isinstance(found.get("content"), str):
        text = "output_text" if found.get("role") == "assistant" else "input_text"
        found["content"] = [{"type": text, "text": found["content"]}]
    return found
