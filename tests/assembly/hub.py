"""A hub of models on loopback, as far as ``huggingface_hub`` asks, and what can go wrong with one."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

REPO = "org/tiny"
COMMIT = "a" * 40
OTHER_COMMIT = "b" * 40

Odd = Callable[["Request"], bool]
"""Answers a request instead of the hub; False: it is answered as usual."""


class Request(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.asked.append((self.command, self.path, self.headers.get("Range", "")))
        if any(odd(self) for odd in self.server.odd):
            return
        path = self.path.partition("?")[0].strip("/").split("/")
        match path:
            case ["api", "models", owner, name, *_] if self._moved(f"{owner}/{name}"):
                pass
            case ["api", "models", _, _, "revision", revision]:
                files = [{"rfilename": name} for name in self.server.files]
                commit = self.server.revisions.get(revision)
                found = commit and {"id": self.server.repo, "sha": commit, "siblings": files}
                self.answer(found or {"error": "Invalid rev id"}, code="" if found else "RevisionNotFound")
            case ["api", "models", _, _, "tree", _]:
                self.answer([self._entry(name, content) for name, content in self.server.files.items()])
            case [owner, name, "resolve", commit, *file] if not self._moved(f"{owner}/{name}"):
                self._file(commit, "/".join(file))
            case [_, _, "resolve", *_]:
                pass
            case _:
                self.answer({"error": "Not found"}, 404)

    do_HEAD = do_GET

    def answer(self, body: object, status: int = 200, code: str = "", headers: dict[str, str] | None = None) -> None:
        """JSON; an error with the code that the client goes by."""
        encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(404 if code == "RevisionNotFound" else status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(encoded)),
            **({"X-Error-Code": code} if code else {}),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(encoded)

    def _moved(self, repo: str) -> bool:
        if repo == self.server.repo:
            return False
        if repo != self.server.former:
            self.answer({"error": "Repository not found"}, 401, "RepoNotFound")
        else:
            self.answer(b"", 307, headers={"Location": self.path.replace(repo, self.server.repo)})
        return True

    @staticmethod
    def _entry(name: str, content: bytes) -> dict[str, object]:
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _file(self, commit: str, name: str) -> None:
        content = self.server.files[name]
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        part = content[first:]
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(part[: self.server.breaks_after])
            if len(part) > self.server.breaks_after:
                self.server.breaks_after = 2**60
                self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


class Hub(ThreadingHTTPServer, AbstractContextManager["Hub"]):
    """Holds one repository."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.repo, self.former = REPO, ""
        """Its name, and the one that it had before."""
        self.files = files
        self.revisions = {"main": COMMIT, "v2": OTHER_COMMIT, OTHER_COMMIT: OTHER_COMMIT}
        self.odd: list[Odd] = []
        self.asked: list[tuple[str, str, str]] = []
        """Method, path and range of every request."""
        self.breaks_after = 2**60
        """Bytes of the next file that is longer, after which the connection breaks once."""
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()
