"""Requests that go on from stored responses: what was said before is put in front, and the answer is stored."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from aiohttp import web

from engine.http.bodies import Body
from engine.http.incoming import client_of, state_of, tenant_of
from engine.service.errors import ApiError
from engine.service.parsing import P, ParsedResponses
from engine.service.response_store import Record, ResponseStore, StoredTurn, Tenant, joined_items
from engine.service.responses_request import with_input


@dataclass(frozen=True, slots=True)
class Storing:
    """Stores the response to a request."""

    store: ResponseStore
    items: bytes
    before: StoredTurn | None
    tenant: Tenant
    owner: str

    def keep(self, record: Record | None) -> None:
        """``record``: the response; ``None``: there is none."""
        if record is not None:
            self.store.keep(record, self.items, self.before, self.tenant, self.owner)


async def read(kind: type[P], http: web.Request, body: Body) -> tuple[P, Storing | None]:
    """What a body asks for, and where its answer is stored, if it is. A body that goes on from stored responses becomes
    one that is whole by itself. Raises :class:`ApiError` like :meth:`ServerState.parse`, and ``not_found`` for what is
    not stored."""
    state = state_of(http)
    whole: P = await state.parse(kind, body)
    parsed = whole
    if not isinstance(parsed, ParsedResponses):
        return whole, None
    options, store = parsed.options, state.responses
    tenant = tenant_of(http, options.user, options.cache_salt)
    before, name = None, options.previous_response_id
    if name is not None:
        before = store.find(name, tenant, "previous_response_id")
    items = _resolved(parsed, store, tenant, body) if parsed.references else parsed.items
    if before is not None or parsed.references:
        said = [*(before.history() if before is not None else ()), items]
        body.become(with_input(body.data, joined_items(said)))
        whole = await state.parse(kind, body)
    owner = client_of(http, options.user)
    return whole, Storing(store, items, before, tenant, owner) if options.store else None


def _resolved(parsed: ParsedResponses, store: ResponseStore, tenant: Tenant, body: Body) -> bytes:
    """The items of a body with those that they refer to in their place: a short reference may stand for a long item,
    many times, so their bytes are limited as those of a body are."""
    items = msgspec.json.decode(joined_items([parsed.items]), type=list[msgspec.Raw])
    known: dict[StoredTurn, dict[str, msgspec.Raw]] = {}
    size = 0
    for at, name in parsed.references:
        param = f"input[{at}]"
        turn = store.of_item(name, tenant, param)
        outputs = known[turn] if turn in known else known.setdefault(turn, turn.outputs())
        if name not in outputs:
            message = f"Item with id {name[:64]!r} not found: the response that it names has no such item."
            raise ApiError("not_found", message, param=param, code="item_not_found")
        items[at] = outputs[name]
        size += len(bytes(items[at]))
        body.check_size(size)
    return msgspec.json.encode(items)[1:-1]
