"""An HTTP server on loopback that takes what exporters post, and answers what it is told to."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Reply(NamedTuple):
    status: int = 200
    body: bytes = b"{}"
    headers: Mapping[str, str] = {}


class Posted(NamedTuple):
    path: str
    headers: Mapping[str, str]
    body: bytes


class Receiver(ThreadingHTTPServer):
    """``replies`` are given in turn; then 200."""

    daemon_threads = True

    def __init__(self, *replies: Reply) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies = list(replies)
        self.posted: list[Posted] = []
        self.came = threading.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def wait(self, count: int) -> list[Posted]:
        """Until so many have come; 10 s is a failure."""
        with self.came:
            assert self.came.wait_for(lambda: len(self.posted) >= count, 10), self.posted
            return list(self.posted)


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.came:
            self.server.posted.append(Posted(self.path, dict(self.headers), body))
            reply = self.server.replies.pop(0) if self.server.replies else Reply()
            self.server.came.notify_all()
        self.send_response(reply.status)
        for name, value in {**reply.headers, "Content-Length": str(len(reply.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply.body)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


@contextmanager
def receiving(*replies: Reply) -> Iterator[Receiver]:
    with Receiver(*replies) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
