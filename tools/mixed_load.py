"""200 mixed concurrent requests against every preset: are all blocks free at the end, and are the outputs equal?

Prompts of 1 to 3,000 tokens, stop strings, token limits, and clients that close their socket midway. Every preset
runs in a server of its own with the bundled model; greedy outputs of requests that were not aborted are compared.

    python tools/mixed_load.py                       # float32: 0 differences expected
    python tools/mixed_load.py --dtype bfloat16      # the count of first differences is printed
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

PRESETS = ("baseline", "latency", "throughput", "balanced")


@dataclass(frozen=True, slots=True)
class Job:
    """One request; ``abort_after`` chunks the client closes its socket."""

    body: dict[str, Any]
    abort_after: int | None


def jobs(count: int, longest: int, seed: int) -> list[Job]:
    """The same mix every time."""
    rng = random.Random(seed)
    shared = [rng.randrange(100, 3000) for _ in range(600)]
    made = []
    for i in range(count):
        length = min(longest, max(1, int(rng.lognormvariate(4.5, 1.6))))
        prompt = [rng.randrange(100, 3000) for _ in range(length)]
        if i % 4 == 0:
            prompt = (shared + prompt)[:longest]
        body: dict[str, Any] = {
            "model": "bundled",
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": rng.randint(1, 48),
        }
        if i % 5 == 0:
            body["stop"] = [rng.choice([" the", "e", "\n", ". "])]
        abort_after = rng.randint(1, 6) if i % 6 == 1 else None
        made.append(Job(body | {"stream": True, "stream_options": {"include_usage": True}}, abort_after))
    return made


async def send(session: aiohttp.ClientSession, url: str, job: Job) -> str | None:
    """The text, or ``None`` if the client closed its socket midway."""
    text, chunks = "", 0
    async with session.post(f"{url}/v1/completions", json=job.body) as response:
        if response.status != 200:
            raise SystemExit(f"{response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise SystemExit(f"error in a stream: {chunk}")
            text += "".join(choice["text"] for choice in chunk["choices"])
            chunks += 1
            if job.abort_after is not None and chunks >= job.abort_after:
                response.close()
                return None
    return text


async def run_preset(preset: str, options: argparse.Namespace) -> list[str | None]:
    """Serve with this preset, send everything at once, check that nothing is held afterwards."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    overrides = [f"+preset={preset}", f"server.port={port}", f"model.dtype={options.dtype}", "device=" + options.device]
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.cli.main", "serve", *overrides, *options.overrides],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        timeout = aiohttp.ClientTimeout(total=900)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await until_ready(session, url, process)
            started = time.monotonic()
            texts = await asyncio.gather(
                *(send(session, url, job) for job in jobs(options.requests, options.longest, options.seed))
            )
            seconds = time.monotonic() - started
            stats = await until_idle(session, url)
        blocks = "; ".join(
            f"{group['group']} blocks leased {group['leased']}, free {group['free']} + cached {group['cached']} of "
            f"{group['total']}"
            for group in stats["blocks"]
        )
        aborted = sum(text is None for text in texts)
        print(f"{preset:12} {len(texts)} requests, {aborted} aborted, {seconds:6.1f} s; {blocks}")
        return list(texts)
    finally:
        process.terminate()
        process.wait(60)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def until_ready(session: aiohttp.ClientSession, url: str, process: subprocess.Popen[bytes]) -> None:
    while True:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with exit code {process.returncode}")
        try:
            async with session.get(f"{url}/ready") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientConnectionError:
            pass
        await asyncio.sleep(0.2)


async def until_idle(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Stats once nothing runs; gives up after 10 s and returns what is then."""
    stats: dict[str, Any] = {}
    for _ in range(100):
        async with session.get(f"{url}/engine/stats") as response:
            stats = await response.json()
        if not stats["running"] and not stats["waiting"] and not any(group["leased"] for group in stats["blocks"]):
            break
        await asyncio.sleep(0.1)
    return stats


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--longest", type=int, default=3000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    outputs = {preset: asyncio.run(run_preset(preset, options)) for preset in PRESETS}
    reference = outputs[PRESETS[0]]
    differing = 0
    for preset in PRESETS[1:]:
        pairs = [(a, b) for a, b in zip(reference, outputs[preset], strict=True) if a is not None and b is not None]
        different = sum(a != b for a, b in pairs)
        differing += different
        print(f"{preset:12} {different} of {len(pairs)} outputs differ from {PRESETS[0]}'s")
    return 1 if differing and options.dtype == "float32" else 0


if __name__ == "__main__":
    sys.exit(main())
