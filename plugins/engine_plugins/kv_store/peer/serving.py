"""Another engine that asks this one for records."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.contracts.kv_store import Loan, RecordId
from engine_plugins.kv_store.peer.greeting import ALL, Card, welcome
from engine_plugins.kv_store.peer.wire import (
    CREDIT,
    GET,
    MESSAGE,
    MISSING,
    MOST_ASKED,
    MOST_IDS,
    MOST_KNOWN,
    RECORD,
    Misbehaved,
    message,
    receive,
    receive_ids,
)
from engine_plugins.kv_store.record_header import header_of


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Records that somebody asks for; ``None``: which there are."""

    by: Visitor
    number: int
    ids: Sequence[RecordId] | None


@dataclass(frozen=True, slots=True)
class Answer:
    """To a request: the records from its first on, as far as they are there."""

    number: int
    ids: Sequence[RecordId]
    loans: Sequence[Loan]


class Visitor:
    """One connection. All of it belongs to the thread that runs :meth:`run`."""

    def __init__(
        self,
        sock: socket.socket,
        card: Card,
        timeout_s: float,
        ask: Callable[[Asked], None],
        give_back: Callable[[Sequence[Loan]], None],
        came: Callable[[], None],
    ) -> None:
        """``ask``: have the loop look for records, which :meth:`answer` is called with; ``give_back``: what was
        sent; ``came``: called when it has greeted."""
        self._socket, self._card, self._timeout_s = sock, card, timeout_s
        self._ask, self._give_back, self._came = ask, give_back, came
        self.is_welcome = self._is_gone = False
        self._answers: deque[Answer] = deque()
        self._news: deque[tuple[int, RecordId]] = deque(maxlen=2 * MOST_KNOWN)
        """``HAVE`` or ``GONE``, and of which."""
        self._unanswered = 0
        self._has_more = asyncio.Event()

    async def run(self) -> None:
        """Until the connection ends. Raises :class:`Misbehaved`, ``OSError``, ``EOFError``, ``TimeoutError``."""
        try:
            if (wants := await welcome(self._socket, self._card)) is None:
                return
            self.is_welcome = True
            self._came()
            if wants == ALL:
                self._ask(Asked(self, 0, None))
            sender = asyncio.create_task(self._send())
            try:
                await self._listen()
            finally:
                sender.cancel()
                (ended,) = await asyncio.gather(sender, return_exceptions=True)
                if isinstance(ended, TimeoutError):
                    raise Misbehaved("did not read what it was sent")
        finally:
            self._is_gone = True
            while self._answers:
                self._give_back(self._answers.popleft().loans)
            self._socket.close()

    def cut(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    async def _listen(self) -> None:
        while True:
            kind, num_ids, number = MESSAGE.unpack(await receive(self._socket, MESSAGE.size))
            if kind != GET:
                raise Misbehaved(f"sent a message of kind {kind}")
            try:
                async with asyncio.timeout(self._timeout_s):
                    ids = await receive_ids(self._socket, num_ids, len(self._card.layout.num_bytes), MOST_ASKED)
            except TimeoutError:
                raise Misbehaved("did not end a request") from None
            self._unanswered += 1
            if self._unanswered > CREDIT:
                raise Misbehaved(f"sent more than {CREDIT} requests without an answer")
            self._ask(Asked(self, number, ids))

    def answer(self, answer: Answer) -> None:
        if self._is_gone:
            return self._give_back(answer.loans)
        self._answers.append(answer)
        self._has_more.set()

    def tell(self, kind: int, ids: Sequence[RecordId]) -> None:
        """``HAVE`` or ``GONE``."""
        self._news.extend([(kind, each) for each in ids])
        self._has_more.set()

    async def _send(self) -> None:
        try:
            while True:
                await self._has_more.wait()
                self._has_more.clear()
                while self._news or self._answers:
                    while self._news:
                        await self._send_news()
                    if self._answers:
                        await self._send_answer(self._answers.popleft())
        finally:
            self.cut()

    async def _send_news(self) -> None:
        kind, ids = self._news[0][0], list[RecordId]()
        while self._news and self._news[0][0] == kind and len(ids) < MOST_IDS:
            ids.append(self._news.popleft()[1])
        await self._say(message(kind, ids))

    async def _send_answer(self, answer: Answer) -> None:
        namespace = self._card.layout.namespace
        try:
            for each, loan in zip(answer.ids, answer.loans, strict=False):
                header = header_of(each, loan.record, namespace)
                await self._say(message(RECORD, number=answer.number) + header, loan.record)
            if len(answer.loans) < len(answer.ids):
                await self._say(message(MISSING, number=answer.number))
            self._unanswered -= 1
        finally:
            self._give_back(answer.loans)

    async def _say(self, *parts: bytes | memoryview) -> None:
        """Raises ``TimeoutError`` for somebody who does not read, and ``OSError``."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._timeout_s):
            for part in parts:
                await loop.sock_sendall(self._socket, part)
