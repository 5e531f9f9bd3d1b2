"""Engines as child processes."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from engine_lab.shared.servers import Refused, Servers


def test_an_engine_that_does_not_start_is_refused_with_its_own_words(tmp_path):
    async def start() -> None:
        async with aiohttp.ClientSession() as session:
            servers = Servers(session, (), tmp_path)
            try:
                await servers.keep([(("quantizer=nonsense",), 0)])
            finally:
                await servers.close()

    with pytest.raises(Refused, match="quantizer=nonsense: no such quantizer option"):
        asyncio.run(start())
