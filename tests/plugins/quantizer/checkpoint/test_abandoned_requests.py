"""A quantized checkpoint with an 8-bit cache, over HTTP: clients that leave cost nothing and disturb nobody."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.plugins.quantizer.checkpoint.test_serving import quantized_bundled
from tests.plugins.quantizer.checkpoint.writers import ct_fp8, gptq

PROMPTS = tuple(f"def {name}(path):\n    '''{name} " for name in ("read", "write", "copy", "move", "walk", "join"))
LENGTH = 40
PLANS = {
    "gptq, int8 cache, little room": (
        gptq(8, 64, True, True, "gptq"),
        ("kv_format=int8", "memory.kv_tokens=256", "kv_allocator=prefix_cache"),
    ),
    "fp8, fp8 cache, drafts": (ct_fp8("channel"), ("kv_format=fp8", "drafter=ngram", "kv_allocator=prefix_cache")),
}


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[int]:
    """The port of a server of this model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    small = ("model.max_len=256", "scheduler.max_requests=4", "scheduler.token_budget=32", "exporter=[]", "threads=1",
             "model.dtype=float32")  # fmt: skip
    command = ["-m", "engine.cli.main", "serve", f"model.path={folder}", f"server.port={port}", "device=cpu"]
    process = subprocess.Popen([sys.executable, *command, *small, *words], stderr=subprocess.STDOUT,
                               stdout=subprocess.PIPE)  # fmt: skip
    try:
        for _ in range(900):
            assert process.poll() is None, process.stdout.read().decode() if process.stdout else ""
            try:
                if asked(port, "GET", "/ready")[0] == 200:
                    break
            except OSError:
                pass
            time.sleep(0.1)  # polling a child process, bounded
        yield port
    finally:
        process.terminate()
        assert process.wait(30) == 0


def asked(port: int, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def complete(port: int, number: int, **options: Any) -> str:
    body = {"prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
    status, answer = asked(port, "POST", "/v1/completions", body | options)
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


def abandon(port: int, number: int) -> None:
    """A stream whose reader leaves: at once, after the head, or after some events."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"prompt": PROMPTS[number % len(PROMPTS)] * 3, "max_tokens": 100, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body | {"temperature": 1.0, "seed": number}))
    if number % 3:
        answer = connection.getresponse()
        for _ in range(number % 7):
            answer.readline()
    connection.close()


def idle_stats(port: int) -> dict[str, Any]:
    """Once nothing is left to do."""
    stats: dict[str, Any] = {}
    for _ in range(200):
        status, stats = asked(port, "GET", "/engine/stats")
        assert status == 200
        if not any(blocks["leased"] for blocks in stats["blocks"]):
            return stats
        time.sleep(0.05)  # polling another process, bounded
    raise AssertionError(f"blocks are still leased: {stats}")


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_streams_that_are_abandoned_leave_no_block_after_and_change_no_answer(name: str, tmp_path: Path) -> None:
    case, words = PLANS[name]
    with serving(quantized_bundled(tmp_path / "model", case), *words) as port:
        alone = [complete(port, number) for number in range(len(PROMPTS))]
        with ThreadPoolExecutor(12) as pool:
            left = [pool.submit(abandon, port, number) for number in range(24)]
            among = [pool.submit(complete, port, number) for number in range(len(PROMPTS))]
            drawn = [pool.submit(complete, port, number, temperature=1.0, seed=5, n=2) for number in range(2)]
            for one in left:
                one.result()
            for drawing in drawn:
                drawing.result()
            answers = [one.result() for one in among]
        stats = idle_stats(port)
        assert all(blocks["free"] + blocks["cached"] == blocks["total"] for blocks in stats["blocks"]), stats
        assert answers == alone
