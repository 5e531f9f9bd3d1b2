"""A server around a scripted engine and a tokenizer of single bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from engine.http.server import Server
from engine.service.transport import Listen

from ..service.fakes import (
    HELLO,
    MODEL,
    DirectRouter,
    MemoryExporter,
    Script,
    ScriptedClient,
    make_plan,
    make_tokenizer,
)

Reply = tuple[int, dict[str, str], bytes]
"""Status, headers, body."""


class Running:
    """A listening server and its parts."""

    def __init__(self, server: Server, client: ScriptedClient, router: DirectRouter, exporter: MemoryExporter) -> None:
        self.server = server
        self.client = client
        self.router = router
        self.exporter = exporter

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def raw(self, data: bytes) -> bytes:
        """Send bytes, read until the server closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(data)
        await writer.drain()
        try:
            async with asyncio.timeout(10):
                return await reader.read()
        finally:
            writer.close()

    async def post(
        self, path: str, body: Any, *headers: str, method: str = "POST"
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (lower case) and body of one request on its own connection."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        head = [f"{method} {path} HTTP/1.1", "Connection: close", f"Content-Length: {len(data)}", *headers]
        if not any(h.lower().startswith("host:") for h in headers):
            head.append("Host: localhost")
        return split(await self.raw("\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + data))

    async def get(self, path: str, *headers: str) -> Reply:
        return await self.post(path, b"", *headers, method="GET")


def split(reply: bytes) -> Reply:
    head, _, body = reply.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
    if headers.get("transfer-encoding") == "chunked":
        body = _dechunk(body)
    return int(lines[0].split()[1]), headers, body


def _dechunk(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            break
        parts.append(rest[:length])
        body = rest[length + 2 :]
    return b"".join(parts)


@asynccontextmanager
async def running(
    script: Script = HELLO,
    start: bool = True,
    router: Any = None,
    beside: Sequence[Listen] = (),
    **server: Any,
) -> AsyncIterator[Running]:
    """A server on a free loopback port over a scripted engine. ``beside``: open other transports."""
    client, router, exporter = ScriptedClient(script), router or DirectRouter(), MemoryExporter()
    parts = make_plan(**server), {"default": client}, router, [exporter], make_tokenizer()
    instance = Server(*parts, beside=beside, say=lambda line: None)
    await instance.listen()
    if start:
        await instance.state.engine.supervisor.start()
    try:
        yield Running(instance, client, router, exporter)
    finally:
        await instance.close()


def chat(content: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def completion(prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **fields}


def events_of(body: bytes) -> list[Any]:
    """The JSON of each event of a stream; checks the framing and that it ends in ``[DONE]``."""
    text = body.decode()
    assert text.endswith("data: [DONE]\n\n")
    found = []
    for block in text.replace(": keepalive\n", "").split("\n\n")[:-2]:
        assert block.startswith("data: ") and "\n" not in block
        found.append(json.loads(block[6:]))
    return found
