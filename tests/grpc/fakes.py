"""A server around a scripted engine that listens for gRPC too, and a client of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as stubs

from engine.contracts.config import GrpcSettings, ServerSettings
from engine.grpc.opening import grpc_transport

from ..http.fakes import Running as Base
from ..http.fakes import running as over_http
from ..service.fakes import HELLO, Script

E = TypeVar("E")
Metadata = tuple[tuple[str, str], ...]


class Running(Base):
    """A listening server, its parts, and a channel to it."""

    def __init__(self, channel: grpc.aio.Channel, *parts: Any) -> None:
        super().__init__(*parts)
        self.channel = channel
        self.stub = stubs.VllmEngineStub(channel)

    @property
    def address(self) -> str:
        (transport,) = self.server.transports
        return transport.address

    def events(self, kind: type[E]) -> list[E]:
        """Those of a kind that were exported."""
        return [event for event in self.exporter.events if isinstance(event, kind)]

    async def generate(self, metadata: Metadata = (), **fields: Any) -> list[Any]:
        """The messages of an answer."""
        return [message async for message in self.stub.Generate(request(**fields), metadata=metadata)]

    async def refused(self, call: Any) -> tuple[str, str, dict[str, str]]:
        """Status, words and trailing metadata of a call that fails."""
        try:
            if hasattr(call, "__aiter__"):
                async for _ in call:
                    pass
            else:
                await call
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details() or "", {k: str(v) for k, v in error.trailing_metadata() or ()}
        raise AssertionError("the call did not fail")

    async def status(self, **fields: Any) -> str:
        """Of a call of ``Generate`` that fails."""
        return (await self.refused(self.stub.Generate(request(**fields))))[0]


def request(text: str = "hi", stream: bool = True, **params: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id="mine", text=text, stream=stream, sampling_params=pb.SamplingParams(**{"max_tokens": 100} | params)
    )


def tokens_of(messages: list[Any]) -> list[int]:
    return [token for message in messages for token in (*message.chunk.token_ids, *message.complete.output_ids)]


@asynccontextmanager
async def running(
    script: Script = HELLO, start: bool = True, listen: str = "127.0.0.1:0", **server: Any
) -> AsyncIterator[Running]:
    """A server on free loopback ports over a scripted engine."""
    settings = {"grpc": GrpcSettings(listen), **server}
    opened = grpc_transport(ServerSettings(grpc=settings["grpc"]))
    assert opened is not None
    async with (
        over_http(script, start, beside=[opened], **settings) as found,
        grpc.aio.insecure_channel(found.server.transports[0].address) as channel,
    ):
        yield Running(channel, found.server, found.client, found.router, found.exporter)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)  # polling, bounded
