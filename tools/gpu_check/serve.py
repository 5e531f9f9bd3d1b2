"""The server over loopback under the engine's own client: what is left of the speed behind HTTP."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from gpu_check import floors
from gpu_check.section import Context, Row, time_row
from gpu_check.shapes import folder_of, shape_of

ENGINE = (sys.executable, "-m", "engine.cli.main")
READY_S = 25.0
MEASURED = ("requests answered", "TTFT p50", "ITL p50", "output")


def run(context: Context) -> None:
    port, log = free_port(), context.scratch / "server.txt"
    where = (
        ["device=cpu", "execution=eager", "attention_kernel=torch", "threads=1"] if context.dry_run else ["device=cuda"]
    )
    most = 512 if context.dry_run else 8192
    command = [*ENGINE, "serve", "+preset=latency", "--model", str(folder_of("1b", context.scratch)),
               f"server.port={port}", f"model.max_len={most}", "drafter=none", *where]  # fmt: skip
    started = time.monotonic()
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        until_ready(f"http://127.0.0.1:{port}", server, log)
        context.emit(Row("serve: from the command to readiness", round(time.monotonic() - started, 1), "s"))
        for at_once in (2,) if context.dry_run else (1, 8, 32):
            if not context.has(*(f"serve, {at_once} at once: {what}" for what in MEASURED)):
                bench(context, port, at_once)
    finally:
        server.terminate()
        server.wait(20)


def bench(context: Context, port: int, at_once: int) -> None:
    """``engine bench`` in its own process; its summary goes into the report as it is."""
    file = context.scratch / f"bench-{at_once}.json"
    prompt, output, requests = (16, 8, 6) if context.dry_run else (512, 64, 4 * max(at_once, 4))
    vocab = shape_of("1b", context.dry_run).vocab_size - 8
    done = subprocess.run(
        [*ENGINE, "bench", "--url", f"http://127.0.0.1:{port}", "--endpoint", "completions", "--prompt-ids", str(vocab),
         "--requests", str(requests), "--concurrency", str(at_once), "--prompt-tokens", str(prompt),
         "--output-tokens", str(output), "--ignore-eos", "--json", str(file)],
        capture_output=True, text=True,
    )  # fmt: skip
    if not file.exists():
        raise RuntimeError(f"engine bench ended with {done.returncode}: {done.stderr[-600:]}")
    result: dict[str, Any] = json.loads(file.read_text())
    summary = {key: value for key, value in result.items() if not isinstance(value, list)}
    counts, metrics = result["requests"], result["metrics"]
    name = f"serve, {at_once} at once"
    ok = counts["ok"] == counts["sent"] == requests
    context.emit(
        Row(f"{name}: requests answered", f"{counts['ok']} of {requests}", target="all", held=ok, detail=summary)
    )
    shape, weight = shape_of("1b", context.dry_run), 4.0 if context.dry_run else 2.0
    first = context.bars(floors.prefill(shape, prompt, weight))
    step = context.bars(floors.decode(shape, at_once, prompt + output // 2, weight=weight))
    context.emit(time_row(f"{name}: TTFT p50", metrics["ttft_ms"]["p50"], first))
    context.emit(time_row(f"{name}: ITL p50", metrics["itl_ms"]["p50"], step))
    rate = result["throughput"]["output_tokens_per_s"]
    most = None if step.floor is None else at_once * 1e3 / step.floor
    context.emit(Row(f"{name}: output", None if rate is None else round(rate, 1), "tokens/s", floor=most))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Raises ``RuntimeError`` when the server ends, or is not ready in time."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}: {log.read_text()[-600:]}")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=2):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.1)
    raise RuntimeError(f"the server was not ready after {READY_S:g} s: {log.read_text()[-600:]}")
