"""Servers of four APIs over raw sockets, which misbehave as they are told; a gateway before them; and what a careful
client makes of its answers."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from engine.contracts.config import GatewaySettings, ProviderSettings, ServerSettings, Settings, SlotConfig
from engine.contracts.counters import Metric
from engine.contracts.exporter import Exporter
from engine.contracts.router import Router
from engine.http.gateway.server import Gateway
from engine.service.targets import Target
from engine.testing.context import build_context
from engine_plugins.router.direct import DirectRouter

from ..fakes import Reply, split

MODEL = "tiny"
CHAT, MESSAGES, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"
APIS = (CHAT, MESSAGES, RESPONSES, OLLAMA)
SSE, NDJSON, JSON = "text/event-stream; charset=utf-8", "application/x-ndjson", "application/json"
NUM_WORDS = 6
FOREVER_S = 30.0
"""Longer than a test may take."""


def words_of(name: str) -> list[str]:
    """What a server says: words that tell which one it was."""
    return [f"{name}{i}" for i in range(NUM_WORDS)]


def event(data: Any, name: str = "") -> bytes:
    return (f"event: {name}\n" if name else "").encode() + f"data: {json.dumps(data)}\n\n".encode()


def chunk(delta: Mapping[str, Any], finish: str | None = None, **fields: Any) -> bytes:
    """An event of a chat's stream."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return event({"object": "chat.completion.chunk", "model": MODEL, "choices": [choice], **fields})


def stream_type(path: str) -> str:
    return NDJSON if path == OLLAMA else SSE


def stream_of(path: str, words: Sequence[str]) -> list[bytes]:
    """A stream as pieces: what begins it, one for each word, what ends it."""
    texts = [f"{word} " for word in words]
    if path == CHAT:
        usage = event({"choices": [], "usage": {"completion_tokens": len(words)}})
        end = chunk({}, "stop") + usage + b"data: [DONE]\n\n"
        return [chunk({"role": "assistant", "content": ""}), *[chunk({"content": text}) for text in texts], end]
    if path == MESSAGES:
        deltas = [
            event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}}, "content_block_delta")
            for text in texts
        ]
        return [
            event({"type": "message_start"}, "message_start"),
            *deltas,
            event({"type": "message_stop"}, "message_stop"),
        ]
    if path == RESPONSES:
        name, end = "response.output_text.delta", event({"type": "response.completed"}, "response.completed")
        deltas = [event({"type": name, "delta": text}, name) for text in texts]
        return [event({"type": "response.created"}, "response.created"), *deltas, end]
    lines = [{"message": {"role": "assistant", "content": text}, "done": False} for text in texts]
    ending = {"message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "stop"}
    return [json.dumps(line).encode() + b"\n" for line in [*lines, ending]]


def whole_of(path: str, words: Sequence[str]) -> bytes:
    """An answer that is no stream."""
    text = " ".join(words)
    message = {"role": "assistant", "content": text}
    if path == CHAT:
        return json.dumps({"model": MODEL, "choices": [{"message": message, "finish_reason": "stop"}]}).encode()
    if path == MESSAGES:
        return json.dumps({"content": [{"type": "text", "text": text}], "stop_reason": "end_turn"}).encode()
    if path == RESPONSES:
        return json.dumps({"output": [{"content": [{"text": text}]}], "status": "completed"}).encode()
    return json.dumps({"message": message, "done": True}).encode()


class Asked(NamedTuple):
    """A request that a server got."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def streams(self) -> bool:
        return bool(json.loads(self.body).get("stream", self.path == OLLAMA))


class Exchange:
    """One request at a server, to be answered or not."""

    def __init__(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
        self.asked = asked
        self._reader = reader
        self._writer = writer
        self._name = name
        self.stream = stream_of(asked.path, words_of(name))
        """Of the whole answer, in pieces."""
        self.whole = whole_of(asked.path, words_of(name))

    @staticmethod
    def of(path: str, name: str) -> Exchange:
        """What a server of this name answers there."""
        nothing: Any = None
        return Exchange(Asked(path, {}, b"{}"), nothing, nothing, name)

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def head(self, status: int, *lines: str) -> None:
        await self.send("\r\n".join([f"HTTP/1.1 {status} Whatever", *lines, "", ""]).encode())

    async def reply(self, status: int, body: bytes, kind: str = JSON, *lines: str) -> None:
        await self.head(status, f"Content-Type: {kind}", f"Content-Length: {len(body)}", *lines)
        await self.send(body)

    async def begin(self, kind: str = "") -> None:
        """The head of a stream."""
        kind = kind or stream_type(self.asked.path)
        await self.head(200, f"Content-Type: {kind}", "Transfer-Encoding: chunked")

    async def pieces(self, *pieces: bytes) -> None:
        """Each with what has been sent before it on its way."""
        for piece in pieces:
            await self.send(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await asyncio.sleep(0)

    async def end(self) -> None:
        """The end of a stream, as HTTP has it."""
        await self.send(b"0\r\n\r\n")

    async def answer(self) -> None:
        """As a healthy server does."""
        if self.asked.streams:
            await self.begin()
            await self.pieces(*self.stream)
            await self.end()
        else:
            await self.reply(200, self.whole)

    async def refuse(self, status: int, code: str, *lines: str) -> None:
        error = {"message": f"refused: {code}", "type": "some_error", "param": None, "code": code}
        await self.reply(status, json.dumps({"error": error}).encode(), JSON, *lines)

    def cut(self) -> None:
        """Close the connection, whatever is missing."""
        self._writer.close()

    def reset(self) -> None:
        """End the connection with a TCP reset."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def until_gone(self) -> None:
        """Returns when the gateway has hung up."""
        async with asyncio.timeout(FOREVER_S):
            while await self._reader.read(1024):
                pass


Fault = Callable[[Exchange], Awaitable[None]]


async def healthy(exchange: Exchange) -> None:
    await exchange.answer()


@dataclass(eq=False)
class Backend:
    """A server. The first requests are answered as ``faults`` say, one each, later ones as :attr:`then`."""

    name: str
    faults: list[Fault] = field(default_factory=list)
    then: Fault = healthy
    models: tuple[str, ...] = (MODEL,)
    models_reply: tuple[int, bytes] | None = None
    """What ``/v1/models`` answers in place of :attr:`models`."""
    has_ready: bool = True
    ready_status: int = 200
    is_deaf: bool = False
    """Probes get no answer."""
    asked: list[Asked] = field(default_factory=list)
    probed: list[Asked] = field(default_factory=list)
    port: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the gateway hangs up on a request that :func:`hang` keeps."""

    async def start(self) -> None:
        self._open: set[asyncio.StreamWriter] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Connections are refused from now on, and those that are open end."""
        self._server.close()
        for writer in tuple(self._open):
            writer.transport.abort()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def id(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def words(self) -> list[str]:
        return words_of(self.name)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = head[0].split(" ")
                exchange = Exchange(Asked(path, headers, body), reader, writer, self.name)
                if method == "GET":
                    await self._probe(exchange)
                else:
                    self.asked.append(exchange.asked)
                    fault = self.faults.pop(0) if self.faults else self.then
                    try:
                        await fault(exchange)
                    finally:
                        if writer.transport.is_closing() or reader.at_eof():
                            self.left.set()
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()

    async def _probe(self, exchange: Exchange) -> None:
        self.probed.append(exchange.asked)
        if self.is_deaf:
            await exchange.until_gone()
        elif exchange.asked.path == "/v1/models" and self.models_reply is not None:
            await exchange.reply(*self.models_reply)
        elif exchange.asked.path == "/v1/models":
            data = [{"id": name, "object": "model", "owned_by": self.name} for name in self.models]
            await exchange.reply(200, json.dumps({"object": "list", "data": data}).encode())
        elif exchange.asked.path == "/ready" and self.has_ready:
            await exchange.reply(self.ready_status, b"{}")
        else:
            await exchange.reply(404, b"{}")


async def healthy_whole(exchange: Exchange) -> None:
    """A whole answer, though a stream may have been asked for."""
    await exchange.reply(200, exchange.whole)


async def hang(exchange: Exchange) -> None:
    """Nothing comes."""
    await exchange.until_gone()


@asynccontextmanager
async def backends(*servers: Backend) -> AsyncIterator[None]:
    for server in servers:
        await server.start()
    try:
        yield
    finally:
        for server in servers:
            await server.stop()


class Outcome(NamedTuple):
    """What a careful client makes of an answer."""

    kind: Literal["answer", "error", "truncated"]
    words: list[str]
    status: int
    headers: dict[str, str]
    body: bytes


class Client:
    """Of a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def raw(self, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.gateway.port)
        writer.write(data)
        try:
            return await reader.read()
        finally:
            writer.close()

    async def request(self, method: str, path: str, body: Any = None, *lines: str) -> Reply:
        return split(await self.raw(request_bytes(method, path, body, *lines)))

    async def ask(self, path: str = CHAT, stream: bool = True, *lines: str, **fields: Any) -> Outcome:
        reply = await self.raw(request_bytes("POST", path, body_for(path, stream, **fields), *lines))
        status, headers, body = split(reply)
        if headers.get("transfer-encoding") == "chunked":
            assert reply.endswith(b"0\r\n\r\n"), "the gateway broke off"
        return outcome(path, status, headers, body)

    async def post(self, path: str, body: Any = None, *lines: str) -> tuple[int, Any]:
        """Status and body."""
        status, _, found = await self.request("POST", path, body, *lines)
        return status, json.loads(found)

    async def json(self, path: str) -> Any:
        status, _, body = await self.request("GET", path)
        assert status == 200, body
        return json.loads(body)

    async def counted(self, metric: Metric) -> dict[str, dict[str, float]]:
        """Of each target: the values of a counter that are not 0."""
        state = self.gateway.state
        readings = [one for one in await state.read_exporters(state.targets.readings) if one.name == metric.name]
        return {one.engine: {label: value for label, value in one.values.items() if value} for one in readings}

    def target(self, server: Backend) -> Target:
        return self.gateway.state.targets[server.id]

    @property
    def loads(self) -> list[tuple[int, int, int]]:
        """Of each target: sequences, queued and running tokens."""
        loads = [target.load for target in self.gateway.state.targets.values()]
        return [(load.sequences, load.queued_tokens, load.running_tokens) for load in loads]


def body_for(path: str, stream: bool, **fields: Any) -> dict[str, Any]:
    prompt = "input" if path == RESPONSES else "messages"
    return {"model": MODEL, prompt: [{"role": "user", "content": "hi"}], "stream": stream, **fields}


def request_bytes(method: str, path: str, body: Any, *lines: str) -> bytes:
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {len(data)}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


def outcome(path: str, status: int, headers: dict[str, str], body: bytes) -> Outcome:
    if not headers.get("content-type", "").startswith(("text/event-stream", NDJSON)):
        found = json.loads(body)
        if status != 200 or found.get("error"):
            return Outcome("error", [], status, headers, body)
        return Outcome("answer", _text_of(path, found).split(), status, headers, body)
    kind: Literal["answer", "error", "truncated"] = "truncated"
    text = ""
    for data in _events(path, body):
        if data == "[DONE]":
            assert path == CHAT
            kind = "answer" if kind == "truncated" else kind
            continue
        assert kind != "error", "something comes after the error"
        try:
            found = json.loads(data)
        except ValueError:
            continue  # a careful client leaves it out
        if found.get("error") or found.get("type") == "error":
            kind = "error"
        elif path == CHAT:
            for choice in found.get("choices", ()):
                text += choice["delta"].get("content") or ""
                if choice["finish_reason"]:
                    kind = "answer"
        elif path == OLLAMA:
            text += found["message"]["content"]
            kind = "answer" if found["done"] else kind
        else:
            delta = found.get("delta", "")
            text += delta["text"] if isinstance(delta, dict) else delta
            kind = "answer" if found["type"] in ("message_stop", "response.completed") else kind
    return Outcome(kind, text.split(), status, headers, body)


def _events(path: str, body: bytes) -> list[str]:
    """The data of each event."""
    if path == OLLAMA:
        return body.decode().splitlines()
    blocks = [block.split("\n") for block in body.decode().split("\n\n")]
    return ["".join([line[6:] for line in block if line.startswith("data: ")]) for block in blocks if any(block)]


def _text_of(path: str, found: Any) -> str:
    if path == CHAT:
        text = found["choices"][0]["message"]["content"]
    elif path == MESSAGES:
        text = found["content"][0]["text"]
    elif path == RESPONSES:
        text = found["output"][0]["content"][0]["text"]
    else:
        text = found["message"]["content"]
    return str(text)


def first_ready() -> Router:
    """A router of which a test knows where it sends a request: to the first target."""
    return DirectRouter(SlotConfig(), build_context())


@asynccontextmanager
async def gateway_at(
    *urls: str,
    make_router: Callable[[], Router] = first_ready,
    exporters: Sequence[Exporter] = (),
    server: Mapping[str, Any] | None = None,
    waits: bool = True,
    **settings: Any,
) -> AsyncIterator[Client]:
    """A gateway on a free loopback port. ``waits``: until each model has a target."""
    quick = {"connect_s": 2.0, "first_byte_s": FOREVER_S, "silence_s": FOREVER_S, "probe_s": 0.1}
    given = Settings(
        server=ServerSettings(port=0, **(server or {})), gateway=GatewaySettings(targets=[*urls], **(quick | settings))
    )
    gateway = Gateway(given, make_router, exporters, say=lambda line: None)
    await gateway.listen()
    working = asyncio.create_task(gateway.work())
    try:
        if waits:
            await until(lambda: all(target.takes_requests for target in gateway.state.targets.values()))
        yield Client(gateway)
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await gateway.close()


@asynccontextmanager
async def with_providers(
    *servers: Backend, of: Mapping[str, tuple[Backend, Mapping[str, Any]]], **given: Any
) -> AsyncIterator[Client]:
    """A gateway before these servers and providers. ``of``: by name, each with its settings but the URL."""
    async with backends(*servers, *[backend for backend, _ in of.values()]):
        providers = {
            name: ProviderSettings(f"{backend.url}/v1", **settings) for name, (backend, settings) in of.items()
        }
        async with gateway_at(*[server.url for server in servers], providers=providers, **given) as client:
            yield client
            await until(lambda: all(load == (0, 0, 0) for load in client.loads))


@asynccontextmanager
async def before(*servers: Backend, **given: Any) -> AsyncIterator[Client]:
    """A gateway before these servers. All that was sent to them has ended when the block has."""
    async with backends(*servers), gateway_at(*[server.url for server in servers], **given) as client:
        yield client
        await until(lambda: all(load == (0, 0, 0) for load in client.loads))
        assert not any(target.sendings for target in client.gateway.state.targets.values())


async def until(condition: Callable[[], bool]) -> None:
    """Returns once it holds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)
