"""The load of ``engine bench`` over gRPC: ``engine_lab.bench.grpc_target``."""

from __future__ import annotations

import argparse

import pytest

from engine_lab.bench import grpc_target
from engine_lab.bench import main as bench
from engine_lab.bench.options import BenchOptions, add_flags, options_of

from ...grpc.fakes import Running, running
from ...service.fakes import in_loop

LOAD = ["--requests", "6", "--concurrency", "2", "--output-tokens", "5", "--prompt-tokens", "20", "--ignore-eos"]


def options(server: Running, *flags: str) -> BenchOptions:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return options_of(parser.parse_args(["--url", server.url, "--grpc", server.address, *LOAD, *flags]))


@in_loop
async def test_the_same_load_is_sent_over_grpc_and_every_token_is_counted() -> None:
    async with running() as server:
        for flags in (["--prompt-tokens", "30"], ["--prompt-ids", "200"]):
            result = await bench.measure(options(server, *flags))
            assert result["requests"]["ok"] == 6 and result["config"]["grpc"] == server.address
            assert result["tokens"]["output"] == 30
        assert len(server.client.requests) == 2 * 7  # with a warm-up each
        assert {len(asked.prompt) for asked in server.client.requests[-6:]} == {20}


@in_loop
async def test_a_call_that_is_refused_is_a_failed_request_with_its_status() -> None:
    async with running(api_key="secret") as server:
        with pytest.raises(bench.ProbeError, match="grpc_unauthenticated"):
            await bench.measure(options(server, "--model", "tiny", "--prompt-ids", "200", "--api-key", ""))
        result = await bench.measure(options(server, "--api-key", "secret", "--prompt-ids", "200"))
        assert result["requests"]["ok"] == 6


@in_loop
async def test_what_grpc_cannot_send_is_refused() -> None:
    async with running() as server:
        for flags in (["--endpoint", "chat"], ["--tokenizer", "x"]):
            with pytest.raises(ValueError, match="--grpc"):
                options(server, *flags)


@in_loop
async def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_target, "find_spec", lambda name: None)
    async with running() as server:
        with pytest.raises(ValueError, match=r"engine\[grpc\]"):
            await bench.measure(options(server))
