from __future__ import annotations

import asyncio

import pytest
from aiohttp.test_utils import TestServer
from tests.lab.bench.test_main import parse_options
from tools.benchmarks.known_server import KnownServer

from engine_lab.bench.main import measure


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_it_streams_as_many_tokens_as_asked_for(endpoint):
    async def run():
        async with TestServer(KnownServer(2, 0.001).app()) as server:
            argv = ["--url", str(server.make_url("")), "--endpoint", endpoint, "--requests", "4", "--concurrency", "3"]
            return await measure(parse_options([*argv, "--output-tokens", "5"]))

    result = asyncio.run(run())
    assert result["requests"]["ok"] == 4 and result["tokens"]["output"] == 20
    assert result["tokens"]["per_chunk"] == 1.0
