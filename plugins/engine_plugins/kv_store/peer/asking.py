"""Another engine, as this one asks it for records."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from time import monotonic

from engine.contracts.kv_store import RecordId
from engine_plugins.kv_store.peer.greeting import ALL, NEW, Card, ItIsMe, NotWelcome, greet, prepare
from engine_plugins.kv_store.peer.wire import (
    CREDIT,
    GET,
    GONE,
    HAVE,
    MESSAGE,
    MISSING,
    MOST_ASKED,
    MOST_ASKED_BYTES,
    MOST_IDS,
    MOST_KNOWN,
    RECORD,
    Misbehaved,
    message,
    receive,
    receive_ids,
    receive_into,
    say,
)
from engine_plugins.kv_store.record_header import HEADER, header_of

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0
"""Between two attempts to reach an engine: twice as long after each that brought nothing."""
FLOOD_S, MOST_NEWS = 10.0, 4 * MOST_KNOWN
"""An engine that names more records within this time is cut off."""

Known = tuple[dict[bytes, None], ...]
"""By group: the records that an engine says it has, oldest first."""


@dataclass(slots=True, eq=False)
class Request:
    """Records that one engine is asked for."""

    number: int
    ids: Sequence[RecordId]
    into: Sequence[memoryview]
    ended: Callable[[int], None]
    """Called once, with how many are there; nothing is written to the buffers after that."""
    good: int = 0
    late: asyncio.TimerHandle | None = None

    def end(self) -> None:
        if self.late is not None:
            self.late.cancel()
        self.ended(self.good)


class Peer:
    """One address. But for :attr:`known`, :meth:`has` and :meth:`forget`, all of it belongs to the thread that runs
    :meth:`run`."""

    def __init__(
        self, address: tuple[str, int], card: Card, timeout_s: float, heard: Callable[[], None] = lambda: None
    ) -> None:
        """``heard``: called when it has named records."""
        self._address, self._card, self._timeout_s, self._heard = address, card, timeout_s, heard
        self.known = self._nothing()
        """What it has, as far as it is connected."""
        self.faults = 0
        self._cleared = 0
        """How often all was forgotten."""
        self._socket: socket.socket | None = None
        self._numbers = count()
        self._waiting: deque[Request] = deque()
        self._asked: deque[Request] = deque()
        self._why = self._said = ""
        self._did_well = self._is_bad = False
        self._retry = asyncio.Event()

    @property
    def name(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"

    def has(self, each: RecordId) -> bool:
        return each[1] in self.known[each[0]]

    def forget(self) -> None:
        """Whatever it has said until now. From any thread; :meth:`cut` is to follow."""
        self._cleared += 1
        self.known = self._nothing()

    def _nothing(self) -> Known:
        return tuple({} for _ in self._card.layout.num_bytes)

    # Its connection ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep connected. Returns where the address is this engine's own."""
        failures = 0
        while True:
            self._did_well = self._is_bad = False
            self._retry.clear()
            try:
                await self._connected()
            except ItIsMe:
                return
            except NotWelcome as reason:
                self._say(f"turned this engine away: {reason}")
            except (Misbehaved, TimeoutError) as reason:
                self._misbehaved(f"{reason}" or "did not greet")
            except (OSError, EOFError):
                if self._why:
                    self._misbehaved(self._why)
            finally:
                self._why = ""
                for request in (*self._asked, *self._waiting):
                    request.end()
                self._asked.clear()
                self._waiting.clear()
            failures = 0 if self._did_well else failures + 1
            with suppress(TimeoutError):
                async with asyncio.timeout(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures, 16))):
                    await self._retry.wait()

    def somebody_came(self) -> None:
        """Perhaps it has just started: it need not be waited for."""
        if not self._is_bad:
            self._retry.set()

    def _misbehaved(self, how: str) -> None:
        self.faults += 1
        self._did_well, self._is_bad = False, True
        self._say(how)

    def _say(self, what: str) -> None:
        if what != self._said:
            self._said = what
            say(f"{self.name} {what}")

    async def _connected(self) -> None:
        cleared, known = self._cleared, self._nothing()
        sock = await self._connect()
        try:
            prepare(sock)
            await greet(sock, self._card, NEW if cleared else ALL)
            self.known = known
            self._socket, self._did_well = sock, True
            if cleared == self._cleared:
                await self._listen(sock, known)
        finally:
            self._socket = None
            self.known = self._nothing()
            sock.close()

    async def _connect(self) -> socket.socket:
        """Raises ``ConnectionError``, ``OSError``."""
        loop, sock = asyncio.get_running_loop(), None
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await loop.getaddrinfo(*self._address, type=socket.SOCK_STREAM)
                family, kind, protocol, _, where = found[0]
                sock = socket.socket(family, kind, protocol)
                sock.setblocking(False)
                await loop.sock_connect(sock, where)
                if sock.getsockname() == sock.getpeername():  # nobody listens, and the system has given it that port
                    raise ConnectionError("nobody listens")
        except BaseException as error:
            if sock is not None:
                sock.close()
            if isinstance(error, TimeoutError):
                raise ConnectionError("no answer") from None
            raise
        return sock

    def cut(self, why: str = "") -> None:
        """End the connection; what was asked for ends, too."""
        self._why = self._why or why
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    # What it says ------------------------------------------------------------------------------------------------

    async def _listen(self, sock: socket.socket, known: Known) -> None:
        """Take messages until the connection ends. Raises :class:`Misbehaved`, ``OSError``, ``EOFError``."""
        sizes, since_s, news = self._card.layout.num_bytes, monotonic(), 0
        while True:
            kind, num_ids, number = MESSAGE.unpack(await receive(sock, MESSAGE.size))
            try:
                async with asyncio.timeout(self._timeout_s):
                    if kind in (HAVE, GONE):
                        ids = await receive_ids(sock, num_ids, len(sizes), MOST_IDS)
                        news = len(ids) + (news if monotonic() - since_s < FLOOD_S else 0)
                        since_s = since_s if news > len(ids) else monotonic()
                        if news > MOST_NEWS:
                            raise Misbehaved(f"named {news} records within {FLOOD_S:.0f} s")
                        self._note(known, ids, kind == HAVE)
                        if kind == HAVE:
                            self._heard()
                    elif kind == RECORD:
                        await self._take_record(sock, self._first_asked(number))
                    elif kind == MISSING:
                        request = self._first_asked(number)
                        group, key = request.ids[request.good]
                        known[group].pop(key, None)
                        self._end_first()
                    else:
                        raise Misbehaved(f"sent a message of kind {kind}")
            except TimeoutError:
                raise Misbehaved(f"took more than {self._timeout_s:g} s for one message") from None

    def _note(self, known: Known, ids: Sequence[RecordId], there: bool) -> None:
        for group, key in ids:
            own = known[group]
            own.pop(key, None)
            if there:
                own[key] = None
                if len(own) > MOST_KNOWN:
                    del own[next(iter(own))]

    def _first_asked(self, number: int) -> Request:
        if not self._asked or self._asked[0].number != number:
            raise Misbehaved("sent what it was not asked for")
        return self._asked[0]

    async def _take_record(self, sock: socket.socket, request: Request) -> None:
        each, buffer = request.ids[request.good], request.into[request.good]
        header = bytes(await receive(sock, HEADER.size))
        _, _, group, _, size, _, key = HEADER.unpack(header)
        if (group, key) != each or size != len(buffer):
            raise Misbehaved("sent another record than it was asked for")
        await receive_into(sock, buffer)
        if header != header_of(each, buffer, self._card.layout.namespace):
            raise Misbehaved("sent a record that is damaged, or of another namespace")
        request.good += 1
        if request.good == len(request.ids):
            self._end_first()

    # What it is asked for ----------------------------------------------------------------------------------------

    def ask(self, ids: Sequence[RecordId], into: Sequence[memoryview], ended: Callable[[int], None]) -> None:
        self._waiting.append(Request(next(self._numbers) & 0xFFFFFFFF, ids, into, ended))
        if self._socket is None:
            self._waiting.pop().end()
        else:
            self._send()

    def _end_first(self) -> None:
        self._asked.popleft().end()
        self._send()

    def _send(self) -> None:
        while self._waiting and len(self._asked) < CREDIT and self._socket is not None:
            request = self._waiting.popleft()
            self._asked.append(request)
            data = message(GET, request.ids, request.number)
            try:
                sent = self._socket.send(data)
            except OSError:
                sent = 0
            if sent < len(data):  # so little always fits, unless nobody reads
                return self.cut("does not take requests")
            late = f"had not answered after {self._timeout_s:g} s"
            request.late = asyncio.get_running_loop().call_later(self._timeout_s, self.cut, late)


def portions(ids: Sequence[RecordId], num_bytes: Sequence[int]) -> list[slice]:
    """Parts of a list of records that may be asked for at once. ``num_bytes``: of a record, by group."""
    found, first, size = [], 0, 0
    for at, (group, _) in enumerate(ids):
        size += num_bytes[group]
        if at > first and (at - first == MOST_ASKED or size > MOST_ASKED_BYTES):
            found.append(slice(first, at))
            first, size = at, num_bytes[group]
    return [*found, slice(first, len(ids))]
