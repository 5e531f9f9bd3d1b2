"""Responses that later requests may go on from (``previous_response_id``): in memory, and in a folder if there is one,
for a while, and within a number of bytes.

The id of a response has a secret part, so that only who got the response knows it; a request of another tenant does not
find it at all. A response that goes on from another one holds what was said before it, also once that one's own id is
gone.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from engine.service.errors import ApiError
from engine.service.response_rows import ResponseRows, Row

Tenant = tuple[str, str]
"""The ``user``, where it is trusted, and the ``cache_salt`` of a request."""
ENTRY_BYTES = 1024
"""What a stored response costs besides its texts: ids, table slots, bookkeeping."""
SECRET_BYTES = 8
PREFIX = "resp_"
REQUEST_DIGITS = 32
"""Hexadecimal digits that tell a request; those of the secret follow."""


def response_id(request_id: str) -> str:
    """The id of the response to a request, whose own id logs and ``/engine/requests`` show."""
    return request_id + secrets.token_hex(SECRET_BYTES)


def request_of(name: str) -> str:
    """The request's id in the id of a response; other names stay as they are."""
    return name[: len(PREFIX) + REQUEST_DIGITS] if name.startswith(PREFIX) else name


@dataclass(frozen=True, slots=True)
class Record:
    """A response that has ended."""

    name: str
    response: bytes
    """The JSON of the whole answer."""
    outputs: bytes
    """The JSON of the items of its output, as the model is shown them later, with commas between."""


@dataclass(slots=True, eq=False)
class StoredTurn:
    """What one request brought, and the response to it."""

    record: Record
    items: bytes
    """The JSON of the items of the request's input, with commas between."""
    before: StoredTurn | None
    """What it went on from."""
    owner: str
    """Who sent the request: see :meth:`ResponseStore.keep`."""
    holders: int = 0
    """Its own id, while that is known, and the turns that go on from it."""

    def outputs(self) -> dict[str, msgspec.Raw]:
        """The items of the output by their ids."""
        items = msgspec.json.decode(b"[" + self.record.outputs + b"]", type=list[msgspec.Raw])
        return {msgspec.json.decode(item, type=_Named).id: item for item in items}

    @property
    def size(self) -> int:
        return ENTRY_BYTES + len(self.items) + len(self.record.outputs) + len(self.record.response)

    def given(self) -> list[bytes]:
        """The items that the model was given, in order: :attr:`items` of pieces."""
        return [*(self.before.history() if self.before is not None else ()), self.items]

    def history(self) -> list[bytes]:
        """The same with the output."""
        turns: list[StoredTurn] = []
        turn: StoredTurn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.before
        return [piece for turn in reversed(turns) for piece in (turn.items, turn.record.outputs)]


@dataclass(frozen=True, slots=True)
class _Entry:
    turn: StoredTurn
    tenant: Tenant
    until_s: float


class ResponseStore:
    """Use on the event loop's thread only."""

    def __init__(
        self,
        max_bytes: int,
        keep_s: float,
        clock: Callable[[], float] = time.monotonic,
        rows: ResponseRows | None = None,
    ) -> None:
        """``max_bytes=0``: nothing is stored. ``clock``: seconds. ``rows``: has what an earlier server stored, and gets
        the same as memory. Raises ``sqlite3.Error`` where they cannot be read."""
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._of_owner: dict[str, OrderedDict[str, None]] = {}
        self._bytes_of: dict[str, int] = {}
        self.num_bytes = 0
        """Of all turns that are held."""
        self._rows: ResponseRows | None = None
        if rows is not None:
            self._take_back(rows)
            self._rows = rows
            self._shorten()

    def keep(self, record: Record, items: bytes, before: StoredTurn | None, tenant: Tenant, owner: str) -> None:
        """Store a response to ``items``, which went on from ``before``. Where bytes are short the owner that has most
        of them loses its oldest response first."""
        self._expire()
        turn = StoredTurn(record, items, before, owner)
        self._hold(turn)
        self._enter(turn, tenant, self._keep_s)
        if self._rows is not None:
            self._rows.know(record.name, tenant, time.time() + self._keep_s)
        self._shorten()

    def find(self, name: str, tenant: Tenant, param: str | None = None) -> StoredTurn:
        """Raises :class:`ApiError` ``not_found`` naming ``param``, the field that has the id."""
        self._expire()
        entry = self._entries.get(name)
        if entry is None or entry.tenant != tenant:
            raise ApiError(
                "not_found",
                f"Response with id {name[:64]!r} not found: it was never stored here, was deleted, or was dropped. "
                f"Responses are kept for {self._keep_s:g} s (server.store_s) within {self._max_bytes} bytes "
                "(server.store_bytes); send the whole conversation as 'input'.",
                param=param,
                code="previous_response_not_found" if param else "response_not_found",
            )
        return entry.turn

    def of_item(self, name: str, tenant: Tenant, param: str) -> StoredTurn:
        """The stored response whose output has, or had, an item of this id. Raises :class:`ApiError` as
        :meth:`find`."""
        return self.find(PREFIX + name.partition("_")[2].rpartition("_")[0], tenant, param)

    def forget(self, name: str, tenant: Tenant) -> None:
        """Raises :class:`ApiError` ``not_found``."""
        self.find(name, tenant)
        self._drop(name)

    def close(self) -> None:
        """Write what is to be found after a restart."""
        if self._rows is not None:
            self._rows.close()

    def _take_back(self, rows: ResponseRows) -> None:
        """What an earlier server stored: each turn with all that was said before it, or not at all."""
        found, now_s = {row.name: row for row in rows.read()}, time.time()
        turns = {name: _turn(row) for name, row in found.items()}
        for name, row in found.items():
            turns[name].before = turns.get(row.before)
        for name, row in sorted(found.items(), key=lambda each: each[1].until):
            if row.until > now_s and _is_whole(turns[name], found):
                self._hold(turns[name])
                self._enter(turns[name], (row.user, row.salt), min(row.until - now_s, self._keep_s))
        for name, turn in turns.items():
            if not turn.holders:
                rows.remove(name)

    def _enter(self, turn: StoredTurn, tenant: Tenant, keep_s: float) -> None:
        name = turn.record.name
        self._entries[name] = _Entry(turn, tenant, self._clock() + keep_s)
        self._of_owner.setdefault(turn.owner, OrderedDict())[name] = None

    def _shorten(self) -> None:
        while self.num_bytes > self._max_bytes:
            largest = max(self._of_owner, key=lambda each: self._bytes_of.get(each, 0))
            self._drop(next(iter(self._of_owner[largest])))

    def _expire(self) -> None:
        now = self._clock()
        while self._entries and (oldest := next(iter(self._entries.items())))[1].until_s <= now:
            self._drop(oldest[0])

    def _drop(self, name: str) -> None:
        turn: StoredTurn | None = self._entries.pop(name).turn
        assert turn is not None
        names = self._of_owner[turn.owner]
        del names[name]
        if not names:
            del self._of_owner[turn.owner]
        if self._rows is not None:
            self._rows.know(name, ("", ""), 0.0)
        while turn is not None:
            turn.holders -= 1
            if turn.holders:
                break
            self._count(turn.owner, -turn.size)
            if self._rows is not None:
                self._rows.remove(turn.record.name)
            turn = turn.before

    def _hold(self, turn: StoredTurn) -> None:
        """Take it in, and what is before it once more: that may have lost its id meanwhile."""
        while True:
            turn.holders += 1
            if turn.holders > 1:
                return
            self._count(turn.owner, turn.size)
            if self._rows is not None:
                self._rows.put(_row(turn))
            if turn.before is None:
                return
            turn = turn.before

    def _count(self, owner: str, more: int) -> None:
        self.num_bytes += more
        self._bytes_of[owner] = self._bytes_of.get(owner, 0) + more
        if not self._bytes_of[owner]:
            del self._bytes_of[owner]


def _row(turn: StoredTurn) -> Row:
    """Its own id is not known yet, or any more."""
    before, record = "" if turn.before is None else turn.before.record.name, turn.record
    return Row(record.name, before, "", "", turn.owner, 0.0, record.response, turn.items, record.outputs)


def _turn(row: Row) -> StoredTurn:
    return StoredTurn(Record(row.name, row.response, row.outputs), row.items, None, row.owner)


def _is_whole(turn: StoredTurn, rows: Mapping[str, Row]) -> bool:
    """Whether all that was said before it is there, and begins somewhere."""
    for _ in rows:
        if turn.before is None:
            return not rows[turn.record.name].before
        turn = turn.before
    return False


class _Named(msgspec.Struct):
    id: str = ""


def joined_items(pieces: Sequence[bytes]) -> bytes:
    """A JSON array of items in pieces, some of which may be empty."""
    return b"[" + b",".join([piece for piece in pieces if piece]) + b"]"
