"""What a target says is read whole, and not without end."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol

from engine.http.gateway.reading import NoAnswer, read_at_most

from ...service.fakes import in_loop


def said(*pieces: bytes) -> StreamReader:
    loop = asyncio.get_running_loop()
    reader = StreamReader(BaseProtocol(loop), limit=2**16, loop=loop)
    for piece in pieces:
        reader.feed_data(piece)
    reader.feed_eof()
    return reader


@in_loop
async def test_what_is_said_in_pieces_is_read_whole() -> None:
    assert await read_at_most(said(b"ab", b"cd"), 4) == b"abcd"
    assert await read_at_most(said(), 4) == b""


@in_loop
async def test_more_than_may_be_read_is_no_answer() -> None:
    with pytest.raises(NoAnswer):
        await read_at_most(said(b"ab", b"cde"), 4)
