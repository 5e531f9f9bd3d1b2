"""gRPC beside server-sent events: CPU time for each token, and what cancelled calls leave behind.

    python -m tools.benchmarks.grpc_cost [--rounds 5] [--tokens 200] [--cancelled 1000] [--json FILE]

One server of the bundled model answers both, in turn, in random order within each round. CPU is that of the API
process and of a client process that parses every message; the engine is a process of its own and not counted. Each
figure is the median over the rounds, the ratio the median of each round's. Then calls are cancelled after their first
token, several times as many, with the memory of the API process after each lot.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import msgspec
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

METHOD = "/vllm.grpc.engine.VllmEngine/Generate"
TRANSPORTS = ("sse", "grpc")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Case:
    """``requests`` in all, ``at_once`` of them; each with so many prompt and output tokens."""

    name: str
    at_once: int
    requests: int
    prompt: int
    output: int

    @property
    def units(self) -> int:
        """Tokens that were streamed, or requests of a single token."""
        return self.requests * self.output


def cases(tokens: int) -> list[Case]:
    return [
        Case("8 streams", 8, 32, 16, tokens),
        Case("64 streams", 64, 128, 16, tokens),
        Case("prompts of 16 ids, 1 token", 8, 400, 16, 1),
        Case("prompts of 3,500 ids, 1 token", 8, 100, 3500, 1),
    ]


def prompt_of(case: Case, number: int) -> list[int]:
    """All but its first tokens are the same, so that the engine computes little."""
    return [3 + number % 4000, *[5 + i % 4000 for i in range(case.prompt - 1)]][::-1]


async def client(transport: str, case: Case, url: str, address: str) -> int:
    """Tokens that came."""
    numbers, tokens = iter(range(case.requests)), 0
    async with aiohttp.ClientSession() as session, grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_stream(
            METHOD,
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )

        async def by_sse(prompt: list[int]) -> int:
            body = {"model": "bundled", "prompt": prompt, "max_tokens": case.output, "stream": True}
            body |= {"ignore_eos": True, "temperature": 0, "return_token_ids": True}
            count, rest = 0, b""
            async with session.post(f"{url}/v1/completions", data=msgspec.json.encode(body)) as response:
                assert response.status == 200, await response.text()
                async for piece in response.content.iter_any():
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data: {"):
                            chunk = msgspec.json.decode(line[6:])
                            count += len(chunk["choices"][0]["token_ids"])
            return count

        async def by_grpc(prompt: list[int]) -> int:
            params = pb.SamplingParams(max_tokens=case.output, ignore_eos=True, temperature=0)
            asked = pb.GenerateRequest(sampling_params=params, stream=True)
            asked.tokenized.input_ids.extend(prompt)
            count = 0
            async for message in call(asked):
                count += len(message.chunk.token_ids)
            return count

        async def worker() -> None:
            nonlocal tokens
            for number in numbers:
                count = await {"sse": by_sse, "grpc": by_grpc}[transport](prompt_of(case, number))
                tokens += count

        await asyncio.gather(*[worker() for _ in range(case.at_once)])
    return tokens


def run_client(arguments: argparse.Namespace) -> None:
    """In a process of its own: says how many tokens came, and the CPU seconds that they took."""
    case = Case("", *arguments.client)
    first = Case("", 1, 2, 4, 2)  # imports
    asyncio.run(client(arguments.transport, first, arguments.url, arguments.address))
    begun = time.process_time()
    tokens = asyncio.run(client(arguments.transport, case, arguments.url, arguments.address))
    print(json.dumps({"tokens": tokens, "cpu_s": time.process_time() - begun}))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextmanager
def server() -> Iterator[tuple[int, str, str]]:
    """Its process id, URL and address of gRPC."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        http, over_grpc = one.getsockname()[1], two.getsockname()[1]
    url, address = f"http://127.0.0.1:{http}", f"127.0.0.1:{over_grpc}"
    overrides = [f"server.port={http}", f"server.grpc.listen={address}", "scheduler.max_requests=64", "device=cpu"]
    with tempfile.TemporaryFile() as said:
        command = [sys.executable, "-P", "-m", "engine.cli.main", "serve", *overrides]
        process = subprocess.Popen(command, stdout=said, stderr=said)
        try:
            for _ in range(600):
                try:
                    get(f"{url}/ready")
                    break
                except (urllib.error.URLError, ConnectionError):
                    time.sleep(0.1)
            yield process.pid, url, address
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


def measured(transport: str, case: Case, pid: int, url: str, address: str) -> tuple[float, float]:
    """CPU microseconds for each token, of server and client."""
    command = [sys.executable, "-m", "tools.benchmarks.grpc_cost", "--transport", transport, "--url", url]
    command += ["--address", address, "--client", *map(str, (case.at_once, case.requests, case.prompt, case.output))]
    before = cpu_s(pid)
    done = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert done["tokens"] == case.units, done
    return (cpu_s(pid) - before) / case.units * 1e6, done["cpu_s"] / case.units * 1e6


def compare(rounds: int, tokens: int, pid: int, url: str, address: str) -> list[dict[str, Any]]:
    found = []
    for case in cases(tokens):
        for transport in TRANSPORTS:
            measured(transport, case, pid, url, address)  # prompts are cached from here on
        taken: dict[str, list[tuple[float, float]]] = {transport: [] for transport in TRANSPORTS}
        for _ in range(rounds):
            for transport in random.sample(TRANSPORTS, len(TRANSPORTS)):
                taken[transport].append(measured(transport, case, pid, url, address))
        for at, side in enumerate(("server", "client")):
            each = {transport: [one[at] for one in taken[transport]] for transport in TRANSPORTS}
            ratios = [over_grpc / sse for sse, over_grpc in zip(each["sse"], each["grpc"])]
            row = {
                "case": case.name,
                "side": side,
                **{transport: statistics.median(values) for transport, values in each.items()},
                "ratio": statistics.median(ratios),
                "ratios": [round(min(ratios), 2), round(max(ratios), 2)],
            }
            found.append(row)
            low, high = row["ratios"]
            print(
                f"{case.name:30} {side}: SSE {row['sse']:7.0f} us, gRPC {row['grpc']:7.0f} us, "
                f"gRPC/SSE {row['ratio']:.2f} ({low}..{high})",
                flush=True,
            )
    return found


async def cancel(number: int, address: str) -> None:
    """So many calls, each cancelled after its first message, 50 at once."""
    numbers = iter(range(number))
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_stream(
            METHOD,
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )

        async def worker() -> None:
            for _ in numbers:
                params = pb.SamplingParams(max_tokens=1000, ignore_eos=True)
                stream = call(pb.GenerateRequest(text="json", stream=True, sampling_params=params))
                await stream.read()
                stream.cancel()

        await asyncio.gather(*[worker() for _ in range(50)])


def leaks(number: int, pid: int, url: str, address: str) -> list[dict[str, Any]]:
    """After each lot, once the server is idle: memory, and what is counted as there."""
    found = []
    for lot in range(6):
        if lot:
            asyncio.run(cancel(number, address))
        for _ in range(100):
            stats = get(f"{url}/engine/stats")
            left = stats["running"] + stats["waiting"] + sum(group["leased"] for group in stats["blocks"])
            if not left:
                break
            time.sleep(0.1)
        found.append({"cancelled": lot * number, "rss_mb": round(rss_mb(pid), 1), "left": left})
        print(f"{lot * number:6} calls cancelled: {found[-1]['rss_mb']} MB, {left} rows, waiting or blocks", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--cancelled", type=int, default=1000, help="calls of a lot")
    parser.add_argument("--json", help="write the figures")
    for name in ("--transport", "--url", "--address"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--client", type=int, nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        run_client(arguments)
        return
    with server() as (pid, url, address):
        result = {
            "cpu_us": compare(arguments.rounds, arguments.tokens, pid, url, address),
            "cancelled": leaks(arguments.cancelled, pid, url, address),
        }
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
