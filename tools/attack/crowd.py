"""Many requests at once from one thread: each has its own connection, and the clock starts when it is fully sent.

An event loop of coroutines would take longer to look at 2,000 answers than the server may take to give them, so this
is a bare epoll loop.
"""

from __future__ import annotations

import re
import select
import socket
import time
from dataclasses import dataclass

from tools.attack.client import Address

_HEAD = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_LENGTH = re.compile(rb"\r\nContent-Length: (\d+)\r\n", re.IGNORECASE)
_RETRY = re.compile(rb"\r\nRetry-After: (\d+)\r\n", re.IGNORECASE)


@dataclass(slots=True)
class Outcome:
    """``status`` 0: the connection ended, or the time was up, before the whole answer came."""

    status: int
    sent_s: float
    """On the monotonic clock."""
    done_s: float
    retry_after: int | None = None

    @property
    def took_ms(self) -> float:
        return (self.done_s - self.sent_s) * 1e3


class Crowd:
    """Clients that each send ``data`` once."""

    def __init__(self, target: Address, data: bytes) -> None:
        self._at = (target.host, target.port)
        self._data = data
        self._epoll = select.epoll()
        self._open: dict[int, _Client] = {}
        self._begun = time.monotonic()
        self.outcomes: list[Outcome] = []
        self.late_s = 0.0
        """The most by which a request left later than it was due."""

    def send_at(self, due: list[float], limit_s: float) -> list[Outcome]:
        """One request at each of these ascending times (seconds from now); waits for all answers until ``limit_s``."""
        at = 0
        while (at < len(due) or self._open) and (now := self._now()) < limit_s:
            while at < len(due) and due[at] <= now:
                self.late_s = max(self.late_s, now - due[at])
                self._begin()
                at += 1
            self._poll(0.05 if at == len(due) else min(0.05, max(0.0, due[at] - self._now())))
        return self._close()

    def keep(self, count: int, seconds: float) -> list[Outcome]:
        """``count`` requests in flight, for so long; those are not waited for."""
        while self._now() < seconds:
            while len(self._open) < count:
                self._begin()
            self._poll(0.05)
        return self._close()

    def _now(self) -> float:
        return time.monotonic() - self._begun

    def _poll(self, wait_s: float) -> None:
        for number, _ in self._epoll.poll(wait_s):
            self._step(self._open[number])

    def _close(self) -> list[Outcome]:
        for client in list(self._open.values()):
            self._end(client, 0)
        self._epoll.close()
        return self.outcomes

    def _begin(self) -> None:
        opened = socket.socket()
        opened.setblocking(False)
        opened.connect_ex(self._at)
        self._open[opened.fileno()] = _Client(opened)
        self._epoll.register(opened, select.EPOLLOUT)

    def _step(self, client: _Client) -> None:
        try:
            if not client.sent_s:
                client.connection.sendall(self._data)
                client.sent_s = time.monotonic()
                self._epoll.modify(client.connection, select.EPOLLIN)
                return
            part = client.connection.recv(65536)
        except OSError:
            self._end(client, 0)
            return
        client.data += part
        if client.is_whole():
            self._end(client, int(_HEAD.match(client.data)[1]))  # type: ignore[index]
        elif not part:
            self._end(client, 0)

    def _end(self, client: _Client, status: int) -> None:
        now = time.monotonic()
        retry = _RETRY.search(client.data)
        self.outcomes.append(Outcome(status, client.sent_s or now, now, int(retry[1]) if retry else None))
        del self._open[client.connection.fileno()]
        client.connection.close()


@dataclass(slots=True)
class _Client:
    connection: socket.socket
    sent_s: float = 0.0
    data: bytes = b""

    def is_whole(self) -> bool:
        head, end, body = self.data.partition(b"\r\n\r\n")
        length = _LENGTH.search(head + b"\r\n")
        return bool(end) and length is not None and len(body) >= int(length[1])
