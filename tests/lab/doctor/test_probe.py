"""What a request of the doctor's own meets."""

from __future__ import annotations

import asyncio

import aiohttp
from tests.lab.conftest import Served

from engine_lab.doctor.probe import probe
from engine_lab.doctor.recording import Probed


def test_a_probe_knows_when_its_text_came_and_which_request_it_was(served: Served) -> None:
    async def sent(url: str) -> Probed:
        async with aiohttp.ClientSession() as session:
            return await probe(session, url, None)

    found = asyncio.run(sent(served.url))
    assert found.figures.keys() == {"probe_first_ms", "probe_spread_ms", "probe_decode_ms"}
    assert served.running.client.requests[-1].request_id.startswith(found.request_id) and found.request_id
    assert asyncio.run(sent("http://127.0.0.1:9")) == Probed()
