"""A small HTTP client that says how an answer ended: whole, with an error, or broken off."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

ROOT = Path(__file__).resolve().parents[2]
"""Where ``python -m tools.attack...`` finds this folder."""
READ_LIMIT = 2**24
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

Ending = Literal["whole", "error", "broken", "truncated", "refused"]
"""``whole``: every choice has its finish reason. ``error``: an error event. ``broken``: the connection ended before
the body did. ``truncated``: the body ended cleanly without either. ``refused``: a status other than 200."""


class Address(Protocol):
    host: str
    port: int


@dataclass(slots=True)
class Reply:
    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes = b""

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True)
class Answer:
    """What became of a completion or chat request."""

    ending: Ending
    status: int = 0
    text: str = ""
    """The output, or the message of an error."""
    at_s: list[float] = field(default_factory=list)
    """When each chunk with output arrived, since the request was sent."""
    code: str = ""
    """Of the error, if there is one."""
    outputs: dict[int, str] = field(default_factory=dict)
    """The text of each choice that has any."""
    finishes: list[int] = field(default_factory=list)
    """The choices that ended, in this order."""

    def take(self, choice: dict[str, Any]) -> str:
        """Note a choice, or a part of one. Returns its text."""
        text, index = _text(choice), choice.get("index", 0)
        self.text += text
        if text:
            self.outputs[index] = self.outputs.get(index, "") + text
        if choice["finish_reason"]:
            self.finishes.append(index)
        return text


def request(path: str, body: Any = None, *headers: str, method: str = "", length: int | None = None) -> bytes:
    """The bytes of a request; ``body`` is bytes or what becomes JSON. ``length``: what the header says of it."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1", "Host: localhost", *headers]
    if body is not None:
        head += ["Content-Type: application/json", f"Content-Length: {len(data) if length is None else length}"]
    return "\r\n".join(head).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + data


class Connection:
    """One connection; answers are read in the order of the requests."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, target: Address, source: str | None = None) -> Connection:
        """``source``: the address of this end."""
        local = None if source is None else (source, 0)
        return cls(*await asyncio.open_connection(target.host, target.port, limit=READ_LIMIT, local_addr=local))

    async def head(self) -> Reply:
        """The next answer without its body. Raises ``ConnectionError``."""
        lines = (await self._until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = (line.partition(":") for line in lines[1:])
        return Reply(int(lines[0].split()[1]), {name.lower(): value.strip() for name, _, value in fields})

    async def parts(self, head: Reply) -> AsyncIterator[bytes]:
        """The body as it comes. Raises ``ConnectionError`` when the connection ends before the body does."""
        if head.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int(await self._until(b"\r\n"), 16):
                yield (await self._exactly(size + 2))[:-2]
            await self._until(b"\r\n")
        elif "content-length" in head.headers:
            yield await self._exactly(int(head.headers["content-length"]))

    async def reply(self, *, bodiless: bool = False) -> Reply:
        """The next answer. ``bodiless``: it is the answer to a HEAD request."""
        head = await self.head()
        if not bodiless and head.status >= 200:
            head.body = b"".join([part async for part in self.parts(head)])
        return head

    async def ask(self, data: bytes) -> Reply:
        self.writer.write(data)
        await self.writer.drain()
        return await self.reply()

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        """End the connection with RST instead of FIN."""
        linger = struct.pack("ii", 1, 0)
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()

    async def _until(self, end: bytes) -> bytes:
        try:
            return (await self.reader.readuntil(end))[: -len(end)]
        except asyncio.IncompleteReadError:
            raise ConnectionResetError("the connection ended within an answer") from None

    async def _exactly(self, size: int) -> bytes:
        try:
            return await self.reader.readexactly(size)
        except asyncio.IncompleteReadError:
            raise ConnectionResetError("the connection ended within an answer") from None


async def once(target: Address, data: bytes) -> Reply:
    """Ask on a connection of its own."""
    connection = await Connection.open(target)
    try:
        return await connection.ask(data)
    finally:
        connection.close()


async def get(target: Address, path: str) -> Reply:
    return await once(target, request(path))


async def ask(target: Address, path: str, body: dict[str, Any], *headers: str, source: str | None = None) -> Answer:
    """Send a completion or chat request on a connection of its own and follow it to its end."""
    answer = Answer("broken")
    try:
        connection = await Connection.open(target, source)
    except OSError:
        return answer
    try:
        connection.writer.write(request(path, body, *headers))
        begun = time.monotonic()
        await connection.writer.drain()
        head = await connection.head()
        answer.status = head.status
        if head.status == 200 and body.get("stream"):
            await _follow(connection, head, answer, begun, body.get("n") or 1)
        else:
            head.body = b"".join([part async for part in connection.parts(head)])
            _take_whole(answer, head)
            answer.at_s.append(time.monotonic() - begun)
    except (ConnectionError, ValueError):
        answer.ending = "broken"
    finally:
        connection.close()
    return answer


def _take_whole(answer: Answer, reply: Reply) -> None:
    shown = reply.json()
    if reply.status != 200:
        error = shown["error"]
        answer.ending, answer.code, answer.text = "refused", error["code"] or "", error["message"]
        return
    for choice in shown["choices"]:
        answer.take(choice)
    answer.ending = "whole" if all(choice["finish_reason"] for choice in shown["choices"]) else "truncated"


async def _follow(connection: Connection, head: Reply, answer: Answer, begun: float, choices: int) -> None:
    """Read a stream. It is truncated unless it shows a finish reason for every choice, or an error."""
    buffer, done = b"", False
    async for part in connection.parts(head):
        *events, buffer = (buffer + part).split(b"\n\n")
        for event in events:
            data = event.rpartition(b"data: ")[2]
            if data == b"[DONE]":
                done = True
                continue
            if not data or b"data: " not in event:
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                error = chunk["error"]
                answer.ending, answer.code, answer.text = "error", error["code"] or "", error["message"]
                return
            for choice in chunk["choices"]:
                if answer.take(choice):
                    answer.at_s.append(time.monotonic() - begun)
    answer.ending = "whole" if done and len(answer.finishes) == choices else "truncated"


def _text(choice: dict[str, Any]) -> str:
    message = choice.get("delta") or choice.get("message") or {}
    return choice.get("text") or message.get("content") or ""
