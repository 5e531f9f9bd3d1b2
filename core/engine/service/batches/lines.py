"""From the file of a batch to requests, and from what they came to, to lines of its output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from engine.service.batches.records import Problem

MOST_PROBLEMS = 100
"""More are not reported of one file."""
MOST_ID_CHARACTERS = 512


class Line(msgspec.Struct, frozen=True):
    """One request of a batch, and where it lies in the file."""

    number: int
    """From 1."""
    custom_id: str
    start: int
    """Bytes before it."""
    size: int


class Answered(msgspec.Struct, frozen=True):
    """What a request came to."""

    status: int
    """Of HTTP: 200, or that of an error."""
    request_id: str
    body: bytes
    """JSON."""

    @property
    def is_ok(self) -> bool:
        return self.status == 200


class _Request(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_decode = msgspec.json.Decoder(_Request).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Validation:
    """Reads a file from its beginning, slice by slice, and finds every problem with it."""

    def __init__(self, path: Path, endpoint: str, most_lines: int, most_bytes: int) -> None:
        """``most_bytes``: of one line."""
        self._path = path
        self._endpoint = endpoint
        self._most_lines = most_lines
        self._most_bytes = most_bytes
        self._seen: dict[str, int] = {}
        self._at = 0
        self._number = 0
        self.total = 0
        """Requests so far."""
        self.problems: list[Problem] = []
        self.is_done = False

    def read(self, count: int) -> list[Line]:
        """The requests of the next ``count`` lines. Raises ``OSError``."""
        found: list[Line] = []
        with open(self._path, "rb") as file:
            file.seek(self._at)
            for _ in range(count):
                raw = file.readline(self._most_bytes + 2)
                if not raw or len(self.problems) >= MOST_PROBLEMS:
                    self._end()
                    break
                start, self._at, self._number = self._at, self._at + len(raw), self._number + 1
                if len(raw.rstrip(b"\r\n")) > self._most_bytes:
                    self._note("line_too_long", f"The line has more than {self._most_bytes} bytes.")
                    self._end()
                    break
                if (line := self._line(raw, start)) is not None:
                    found.append(line)
                if self.total > self._most_lines:
                    self._note("too_many_lines", f"The file has more than {self._most_lines} requests.")
                    self._end()
                    break
        return found

    def _line(self, raw: bytes, start: int) -> Line | None:
        if not raw.strip():
            return None
        self.total += 1
        try:
            request = _decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            is_field = isinstance(error, msgspec.ValidationError)
            self._note("invalid_request" if is_field else "invalid_json_line", f"{str(error)[:200]}.")
            return None
        for param, code, message in self._wrong(request):
            self._note(code, message, param)
        return Line(self._number, request.custom_id, start, len(raw))

    def _wrong(self, request: _Request) -> list[tuple[str, str, str]]:
        name, found = request.custom_id, []
        if not name or len(name) > MOST_ID_CHARACTERS:
            message = f"custom_id has {len(name)} characters; expected 1 to {MOST_ID_CHARACTERS}."
            found.append(("custom_id", "invalid_custom_id", message))
        elif (before := self._seen.setdefault(name, self._number)) != self._number:
            message = f"The custom_id {name[:64]!r} is that of line {before}, too; expected one for each line."
            found.append(("custom_id", "duplicate_custom_id", message))
        if request.method != "POST":
            found.append(("method", "invalid_method", f"method is {request.method[:16]!r}; expected 'POST'."))
        if request.url != self._endpoint:
            message = f"url is {request.url[:64]!r}; expected {self._endpoint!r}, the endpoint of the batch."
            found.append(("url", "mismatched_endpoint", message))
        if not bytes(request.body).lstrip().startswith(b"{"):
            found.append(("body", "invalid_body", "body is no JSON object."))
        return found

    def _end(self) -> None:
        self.is_done = True
        if not self.total and not self.problems:
            self._note("empty_file", "The file has no requests.")

    def _note(self, code: str, message: str, param: str | None = None) -> None:
        self.problems.append(Problem(code, message, param, self._number or None))


def body_of(raw: bytes) -> bytes:
    """The body of the request of a line that was valid."""
    return bytes(_decode(raw).body)


def first_url(path: Path, most_bytes: int) -> str:
    """The ``url`` of the first request of a file; empty where there is none. Raises ``OSError``."""
    with open(path, "rb") as file:
        while raw := file.readline(most_bytes):
            if raw.strip():
                try:
                    url = msgspec.json.decode(_decode_fields(raw).get("url", msgspec.Raw(b"null")))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    return ""
                return url if isinstance(url, str) else ""
    return ""


def output_line(batch: str, line: Line, answered: Answered) -> bytes:
    """The line of the output, or of the errors."""
    response = {
        "status_code": answered.status,
        "request_id": answered.request_id,
        "body": msgspec.Raw(answered.body),
    }
    return _written(batch, line, response, None)


def unanswered_line(batch: str, line: Line, code: str, message: str) -> bytes:
    """The line of the errors of a request that was not run to its end."""
    return _written(batch, line, None, {"code": code, "message": message})


def _written(batch: str, line: Line, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    name = f"batch_req_{batch.removeprefix('batch_')}{line.number:06d}"
    return msgspec.json.encode({"id": name, "custom_id": line.custom_id, "response": response, "error": error})
