"""A small request by the way that clients take, through whatever is between: does its answer come piece by piece?"""

from __future__ import annotations

import asyncio
import time

import aiohttp

from engine_lab.bench.probe import ProbeError, find_model
from engine_lab.bench.stream import read_stream
from engine_lab.bench.target import Target
from engine_lab.bench.workload import BenchRequest
from engine_lab.doctor.recording import Probed

TOKENS = 48
PROMPT = "Count."
TIMEOUT_S = 5.0


async def probe(session: aiohttp.ClientSession, url: str, api_key: str | None) -> Probed:
    """Empty where no stream comes back, or the server does not say what it took."""
    try:
        target = Target(url, await find_model(session, url, api_key), "chat", api_key, ignore_eos=True)
        body = target.body(BenchRequest(0, PROMPT, TOKENS))
        sent_s = time.monotonic()
        async with asyncio.timeout(TIMEOUT_S), session.post(target.url, json=body, headers=target.headers) as response:
            found = await read_stream(response.content.iter_any(), time.monotonic)
    except (ProbeError, aiohttp.ClientError, TimeoutError):
        return Probed()
    if not found.chunks_s or "decode_ms" not in found.timings:
        return Probed({}, found.response_id)
    figures = {
        "probe_first_ms": (found.chunks_s[0] - sent_s) * 1e3,
        "probe_spread_ms": (found.chunks_s[-1] - found.chunks_s[0]) * 1e3,
        "probe_decode_ms": float(found.timings["decode_ms"]),
    }
    return Probed(figures, found.response_id)
