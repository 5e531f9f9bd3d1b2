"""What goes to a URL, from a thread of its own: bounded, tried again where that may help, else dropped and counted."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import structlog

MAX_BATCH, MAX_PENDING = 512, 8192
ATTEMPTS = 5
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
NO_ANSWER = 0
TRY_AGAIN = (429, 502, 503, 504)
"""Statuses of a server that may take the same body later."""
CLOSE_S = 2.0
"""How long the end may take, for what is pending."""
REPORT_S = 60.0
"""Between two lines about what was dropped."""

T = TypeVar("T")
log = structlog.get_logger("engine.outbox")


class Outbox(Generic[T]):
    """Items on their way, as JSON bodies of up to :data:`MAX_BATCH` of them."""

    def __init__(
        self,
        url: str,
        encode: Callable[[Sequence[T]], bytes],
        *,
        headers: Mapping[str, str],
        timeout_s: float,
        gather_s: float = 0.0,
        first_wait_s: float = FIRST_WAIT_S,
        refused: Callable[[bytes], int] = lambda answer: 0,
    ) -> None:
        """``gather_s``: what else comes within that time leaves with the first. ``first_wait_s``: before the second
        attempt; doubled with each. ``refused``: how many items of a body that was taken were not."""
        self._parts = urlsplit(url)
        self._encode, self._refused = encode, refused
        self._headers = {"Content-Type": "application/json", **headers}
        self._timeout_s, self._gather_s, self._first_wait_s = timeout_s, gather_s, first_wait_s
        self._pending: deque[T] = deque()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._close_by = float("inf")
        self._report_at = 0.0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.sent = 0
        """Items that were taken."""
        self.dropped = 0
        """Items that were not, or for which there was no room."""

    def put(self, item: T) -> None:
        """Returns at once. Call from one thread."""
        if len(self._pending) >= MAX_PENDING:
            self._drop(1, "the server does not keep up")
            return
        self._pending.append(item)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
            self._thread.start()
        self._wake.set()

    def close(self) -> None:
        """Send what is pending, once; whatever is left after :data:`CLOSE_S` is dropped."""
        self._close_by = time.monotonic() + CLOSE_S
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        closing = False
        while not closing:
            self._wake.wait()
            self._closing.wait(self._gather_s)
            self._wake.clear()
            closing = self._closing.is_set()
            while self._pending:
                self._send([self._pending.popleft() for _ in range(min(MAX_BATCH, len(self._pending)))])

    def _send(self, items: Sequence[T]) -> None:
        body, wait_s = self._encode(items), self._first_wait_s
        for attempt in range(1, ATTEMPTS + 1):
            status, answer, asked_s = self._post(body)
            if 200 <= status < 300:
                refused = min(self._refused(answer), len(items))
                self.sent += len(items) - refused
                self._drop(refused, "the server took a part")
                return
            may_help = status == NO_ANSWER or status in TRY_AGAIN
            if not may_help or attempt == ATTEMPTS or self._closing.is_set():
                break
            seconds = wait_s if asked_s is None else asked_s
            self._closing.wait(min(seconds, LONGEST_WAIT_S) * random.uniform(1.0, 1.2))
            wait_s *= 2
        self._drop(len(items), f"status {status}" if status else answer.decode("utf-8", "replace"))

    def _post(self, body: bytes) -> tuple[int, bytes, float | None]:
        """Status, answer and the seconds of ``Retry-After``; :data:`NO_ANSWER`, and why, where there is none."""
        timeout_s = min(self._timeout_s, self._close_by - time.monotonic())
        if timeout_s <= 0:
            return NO_ANSWER, b"there was no time left", None
        make = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        connection = make(self._parts.hostname or "", self._parts.port, timeout=timeout_s)
        path = (self._parts.path or "/") + (f"?{self._parts.query}" if self._parts.query else "")
        try:
            connection.request("POST", path, body, self._headers)
            response = connection.getresponse()
            return response.status, response.read(65536), seconds_of(response.getheader("Retry-After"))
        except (OSError, HTTPException, ValueError) as error:  # ValueError: what HTTP cannot carry
            return NO_ANSWER, (str(error) or type(error).__name__).encode(), None
        finally:
            connection.close()

    def _drop(self, count: int, why: str) -> None:
        with self._lock:  # both threads drop
            self.dropped += count
            if count and time.monotonic() >= self._report_at:
                self._report_at = time.monotonic() + REPORT_S
                to = f"{self._parts.hostname}:{self._parts.port or self._parts.scheme}{self._parts.path}"
                log.warning("exporter dropped items", to=to, why=why, dropped=self.dropped)


def seconds_of(retry_after: str | None) -> float | None:
    """Of the header: a number of seconds, or a date."""
    if retry_after is None:
        return None
    if retry_after.isascii() and retry_after.isdigit():
        return float(retry_after)
    try:
        return max(0.0, (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):
        return None
