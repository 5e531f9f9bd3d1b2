"""``engine serve server.grpc.listen=...`` with the bundled model, and the official client."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as stubs

KEY = "a-key"
METADATA = (("authorization", f"Bearer {KEY}"),)
QUESTION = {
    "model": "bundled",
    "messages": [{"role": "user", "content": "What does json.dumps do?"}],
    "temperature": 0,
    "max_tokens": 80,
    "return_token_ids": True,
}


class Served:
    """A server in a process of its own."""

    def __init__(self, url: str, address: str, process: subprocess.Popen[bytes], output: Path) -> None:
        self.url, self.address, self.process, self.output = url, address, process, output

    def http(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=20) as response:
            return json.load(response)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("grpc")
    address, output = f"unix:{folder}/socket", folder / "output"
    overrides = [f"server.port={port}", f"server.grpc.listen={address}", f"server.api_key={KEY}", "device=cpu"]
    command = [sys.executable, "-m", "engine.cli.main", "serve", *overrides]
    with output.open("wb") as written:
        process = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT)
    found = Served(f"http://127.0.0.1:{port}", address, process, output)
    try:
        for _ in range(600):
            assert process.poll() is None, output.read_text()
            try:
                found.http("/ready")
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)  # polling a child process, bounded
        yield found
    finally:
        process.kill()
        process.wait(30)


def asked(**params: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(stream=True, sampling_params=pb.SamplingParams(temperature=0, **params))


def test_the_tokens_are_those_of_http(served: Served) -> None:
    over_http = served.http("/v1/chat/completions", QUESTION)
    (choice,) = over_http["choices"]
    request = asked(max_tokens=80)
    request.tokenized.input_ids.extend(over_http["prompt_token_ids"])
    with grpc.insecure_channel(served.address) as channel:
        *chunks, last = stubs.VllmEngineStub(channel).Generate(request, metadata=METADATA)
    assert [token for message in chunks for token in message.chunk.token_ids] == choice["token_ids"]
    assert len(chunks) > 20 and last.complete.finish_reason == "stop"
    assert last.complete.completion_tokens == over_http["usage"]["completion_tokens"]


def test_calls_that_are_cancelled_leave_no_blocks_behind(served: Served) -> None:
    with grpc.insecure_channel(served.address) as channel:
        calls = []
        for number in range(24):
            request = asked(max_tokens=300, ignore_eos=True)
            request.text = "json"
            calls.append(stubs.VllmEngineStub(channel).Generate(request, metadata=METADATA))
            if number % 2:
                next(calls[-1])
        for call in calls:
            call.cancel()
        for _ in range(200):
            stats = served.http("/engine/stats")
            if not (leased := sum(group["leased"] for group in stats["blocks"])) and not stats["running"]:
                break
            time.sleep(0.05)  # polling, bounded
        assert (stats["running"], stats["waiting"], leased) == (0, 0, 0)


def test_a_signal_drains_calls_of_grpc_as_those_of_http(served: Served) -> None:
    """The last one: it ends the server."""
    with grpc.insecure_channel(served.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        watched: list[int] = []

        def watch() -> None:
            try:
                for answer in health.Watch(health_pb2.HealthCheckRequest()):
                    watched.append(answer.status)
            except grpc.RpcError:
                pass  # the server has ended

        watching = threading.Thread(target=watch)
        watching.start()
        request = asked(max_tokens=300, ignore_eos=True)
        request.text = "json"
        stream = stubs.VllmEngineStub(channel).Generate(request, metadata=METADATA)
        next(stream)
        served.process.send_signal(signal.SIGTERM)
        *_, last = stream
        assert (last.complete.finish_reason, last.complete.completion_tokens) == ("length", 300)
        assert served.process.wait(30) == 0
        watching.join(10)
        assert watched[0] == health_pb2.HealthCheckResponse.SERVING  # who watches does not keep the server from ending
    said = served.output.read_text()
    assert f"/v1, gRPC at {served.address}\n" in said
    assert "draining: 1 sequences in flight" in said and "Traceback" not in said
