"""What a gateway adds: latency of the first token, and its CPU for each token that it passes on, beside other gateways.

    python -m tools.benchmarks.gateways [--only engine,smg,nginx,haproxy] [--streams 1,8,64] [--rounds 3]

Two servers that send a token of 250 bytes every 4 ms stand behind each gateway, each of the contestants on this
machine in turns. A stream has 100 tokens, and each of ``--streams`` is followed by the next one. ``added`` is what the
way there and back takes, by one clock; ``direct`` is without a gateway, so what client and servers take themselves.
CPU is that of the gateway's processes, by token. nginx and haproxy take turns between servers and read no body; smg
(``--smg PATH``, of a ``pip install smg``) and this gateway read each and place it. No model runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TOKENS, PACE_S = 100, 0.004
FIRST_PORT = 9300
TICKS = os.sysconf("SC_CLK_TCK")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\n"


# The servers behind


async def serve_tokens(port: int) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head, body = await read_message(reader)
                path = head.split(b" ", 2)[1]
                if path.startswith(b"/v1/chat"):
                    await stream(writer, time.monotonic(), json.loads(body)["max_tokens"])
                else:
                    known = {b"/v1/models": {"object": "list", "data": [{"id": "paced", "object": "model"}]}}
                    data = json.dumps(known.get(path, {"model_path": "paced", "status": "ok"})).encode()
                    writer.write(HEAD % b"application/json" + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", port) as server:
        await server.serve_forever()


async def stream(writer: asyncio.StreamWriter, received_s: float, tokens: int) -> None:
    writer.write(HEAD % b"text/event-stream" + b"Transfer-Encoding: chunked\r\n\r\n")
    next_s = time.monotonic()
    for _ in range(tokens):
        text = f"{received_s:.6f} {time.monotonic():.6f}"
        chunk = {
            "id": "chatcmpl-0123456789abcdef0123456789abcdef", "object": "chat.completion.chunk", "model": "paced",
            "choices": [{"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}],
        }  # fmt: skip
        data = b"data: " + json.dumps(chunk).encode() + b"\n\n"
        writer.write(b"%x\r\n" % len(data) + data + b"\r\n")
        next_s += PACE_S
        if (wait_s := next_s - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)
    writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


async def read_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return head, await reader.readexactly(length)


# The client


@dataclass
class Figures:
    first_ms: list[float] = field(default_factory=list)
    later_ms: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)


async def ask(port: int, streams: int, requests: int) -> tuple[list[float], list[float]]:
    """Added milliseconds of first tokens, and of later ones."""
    first: list[float] = []
    later: list[float] = []
    body = {
        "model": "paced",
        "stream": True,
        "max_tokens": TOKENS,
        "messages": [{"role": "user", "content": "?" * 800}],
    }

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(requests):
            data = json.dumps(body).encode()
            sent_s = time.monotonic()
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(data) + data
            )
            seen, buffer = 0, b""
            while b"data: [DONE]" not in buffer or not buffer.endswith(b"0\r\n\r\n"):
                piece = await reader.read(65536)
                now_s = time.monotonic()
                if not piece:
                    raise RuntimeError(f"a stream ended after {seen} tokens: {buffer[-300:]!r}")
                buffer = buffer[-300:] + piece if seen else buffer + piece
                for part in piece.split(b'"content": "')[1:]:
                    received, left = map(float, part.split(b'"', 1)[0].split())
                    if not seen:
                        first.append((received - sent_s + now_s - left) * 1e3)
                    else:
                        later.append((now_s - left) * 1e3)
                    seen += 1
            if seen < TOKENS * 0.99:
                raise RuntimeError(f"only {seen} of {TOKENS} tokens were seen")
        writer.close()

    await asyncio.gather(*[one() for _ in range(streams)])
    return first, later


# The contestants


def engine(port: int, behind: Sequence[int], folder: Path, args: argparse.Namespace) -> list[str]:
    words = [sys.executable, "-m", "engine.cli.main", "gateway", *[f"http://127.0.0.1:{one}" for one in behind]]
    return [*words, f"server.port={port}"]


def smg(port: int, behind: Sequence[int], folder: Path, args: argparse.Namespace) -> list[str]:
    urls = [f"http://127.0.0.1:{one}" for one in behind]
    words = [args.smg, "launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls]
    return [*words, "--policy", "cache_aware", "--prometheus-port", str(port + 1000), "--log-level", "warn"]


def nginx(port: int, behind: Sequence[int], folder: Path, args: argparse.Namespace) -> list[str]:
    servers = " ".join(f"server 127.0.0.1:{one};" for one in behind)
    (folder / "nginx.conf").write_text(
        f"daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;\n"
        "events { worker_connections 1024; }\n"
        f"http {{ access_log off; client_body_temp_path {folder}; proxy_temp_path {folder};\n"
        f"fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};\n"
        f"upstream behind {{ {servers} keepalive 128; }}\n"
        f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://behind; proxy_http_version 1.1;\n"
        'proxy_set_header Connection ""; proxy_buffering off; } } }\n'
    )
    return ["nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder)]


def haproxy(port: int, behind: Sequence[int], folder: Path, args: argparse.Namespace) -> list[str]:
    servers = "\n".join(f"  server s{one} 127.0.0.1:{one}" for one in behind)
    (folder / "haproxy.cfg").write_text(
        "global\n  nbthread 1\ndefaults\n  mode http\n  option http-no-delay\n  timeout connect 3s\n"
        "  timeout client 60s\n  timeout server 60s\n"
        f"frontend f\n  bind 127.0.0.1:{port}\n  default_backend b\nbackend b\n{servers}\n"
    )
    return ["haproxy", "-f", str(folder / "haproxy.cfg")]


CONTESTANTS = {"engine": engine, "smg": smg, "nginx": nginx, "haproxy": haproxy}


def cpu_s(pid: int) -> float:
    """Of a process and its children that live."""
    total, found = 0.0, {pid}
    for entry in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(entry.name) in found or int(fields[1]) in found:
                found.add(int(entry.name))
                total += (int(fields[11]) + int(fields[12])) / TICKS
    return total


@contextlib.asynccontextmanager
async def running(words: Sequence[str], port: int, folder: Path) -> AsyncIterator[int]:
    with (folder / f"{port}.log").open("w") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True, cwd=folder)
    try:
        for _ in range(300):
            if process.poll() is not None:
                raise SystemExit(f"{words[0]} ended:\n{(folder / f'{port}.log').read_text()[-2000:]}")
            with contextlib.suppress(OSError, RuntimeError, TimeoutError):
                await asyncio.wait_for(ask(port, 1, 1), 5)
                break
            await asyncio.sleep(0.1)
        else:
            raise SystemExit(f"{words[0]} does not pass requests on:\n{(folder / f'{port}.log').read_text()[-2000:]}")
        yield process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


async def measure(args: argparse.Namespace) -> None:
    names = [name for name in args.only.split(",") if name]
    streams = [int(one) for one in args.streams.split(",")]
    found: dict[tuple[str, int], Figures] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        behind = [FIRST_PORT, FIRST_PORT + 1]
        servers = [
            subprocess.Popen([sys.executable, "-m", "tools.benchmarks.gateways", "--serve", str(port)])
            for port in behind
        ]
        try:
            async with contextlib.AsyncExitStack() as stack:
                running_at = {"direct": (behind[0], os.getpid())}
                for i, contestant in enumerate(names):
                    port = FIRST_PORT + 10 + i
                    words = CONTESTANTS[contestant](port, behind, folder, args)
                    running_at[contestant] = port, await stack.enter_async_context(running(words, port, folder))
                for _ in range(args.rounds):
                    for number in streams:
                        for contestant, (port, pid) in running_at.items():
                            requests = max(2, args.requests // number)
                            await asyncio.sleep(0.2)
                            begun_s = cpu_s(pid)
                            first, later = await ask(port, number, requests)
                            took_s = cpu_s(pid) - begun_s
                            figures = found.setdefault((contestant, number), Figures())
                            figures.first_ms += first
                            figures.later_ms += later
                            figures.cpu_us.append(took_s * 1e6 / (number * requests * TOKENS))
        finally:
            for server in servers:
                server.terminate()
    print("| streams | gateway | first token added ms P50, P99 | later ones | CPU us a token |\n|---|---|---|---|---|")
    for number in streams:
        for contestant in running_at:
            figures = found[contestant, number]
            cells = [
                f"{statistics.median(ms):.2f}, {statistics.quantiles(ms, n=100)[98]:.2f}"
                for ms in (figures.first_ms, figures.later_ms)
            ]
            cpu = "" if contestant == "direct" else f"{statistics.median(figures.cpu_us):.0f}"
            print(f"| {number} | {contestant} | {cells[0]} | {cells[1]} | {cpu} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="engine,nginx,haproxy", help="contestants, with commas")
    parser.add_argument("--streams", default="1,8,64")
    parser.add_argument("--requests", type=int, default=64, help="of all streams together, in a round; at least 2 each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smg", default="smg", help="the program of a pip install smg")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    asyncio.run(measure(args) if args.serve is None else serve_tokens(args.serve))


if __name__ == "__main__":
    main()
