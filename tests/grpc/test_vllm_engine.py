"""Methods beside ``Generate``, health and reflection: ``engine.grpc.vllm_engine``, ``engine.grpc.health``,
``engine.grpc.tokenizer_files``."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from engine.grpc import health, tokenizer_files, vllm_engine
from engine.service.tokenizer import Tokenizer

from ..service.fakes import END, MAX_LEN, MODEL, VOCAB, in_loop
from .fakes import Running, running, until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
BUNDLED = Path(__file__).resolve().parents[2] / "core" / "engine" / "bundled"


@in_loop
async def test_the_model_and_the_server_are_described() -> None:
    async with running() as server:
        model = await server.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.served_model_name, model.max_context_length, model.vocab_size) == (MODEL, MAX_LEN, VOCAB)
        assert model.is_generation and list(model.eos_token_ids) == [END]
        found = await server.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert found.server_type == "engine-grpc" and found.block_size == 16 and not found.is_paused


@in_loop
async def test_loads_are_what_was_sent_and_has_not_ended() -> None:
    async with running() as server:
        server.client.hold_before = 2
        task = asyncio.create_task(server.generate())
        await server.client.holding.wait()
        (load,) = (await server.stub.GetLoads(pb.GetLoadsRequest())).loads
        assert (load.num_total_reqs, load.max_total_num_tokens) == (1, 112)
        server.client.proceeding.set()
        await task
        (load,) = (await server.stub.GetLoads(pb.GetLoadsRequest())).loads
        assert load.num_total_reqs == 0


@in_loop
async def test_methods_that_are_not_served_say_so() -> None:
    async with running() as server:
        for method, message in (
            (server.stub.Embed, pb.EmbedRequest()),
            (server.stub.FlushCache, common_pb2.FlushCacheRequest()),
            (server.stub.StartProfile, common_pb2.StartProfileRequest()),
            (server.stub.SubscribeKvEvents, common_pb2.SubscribeKvEventsRequest()),
        ):
            assert (await server.refused(method(message)))[0] == "UNIMPLEMENTED"


def test_every_method_of_the_protocol_has_its_record() -> None:
    described = pb.DESCRIPTOR.services_by_name["VllmEngine"].methods
    records = vllm_engine.VllmEngine(None).methods()  # type: ignore[arg-type]
    assert {method.name: method.input_type.full_name for method in described} == {
        record.name: record.message.DESCRIPTOR.full_name for record in records
    }


@in_loop
async def test_a_tokenizer_comes_as_an_archive_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as server:
        monkeypatch.setattr(vllm_engine, "archive", lambda _: tokenizer_files.archive(str(BUNDLED)))
        chunks = [chunk async for chunk in server.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        data = b"".join([chunk.data for chunk in chunks])
        assert [bool(chunk.sha256) for chunk in chunks[:-1]] == [False] * (len(chunks) - 1)
        assert hashlib.sha256(data).hexdigest() == chunks[-1].sha256
        zipfile.ZipFile(io.BytesIO(data)).extractall(tmp_path)
        there, here = [Tokenizer.from_directory(folder) for folder in (tmp_path, BUNDLED)]
        assert there.encode_now("json.dumps(obj)") == here.encode_now("json.dumps(obj)")


@in_loop
async def test_a_model_without_such_files_has_none_to_send() -> None:
    async with running() as server:
        call = server.stub.GetTokenizer(common_pb2.GetTokenizerRequest())
        status, words, _ = await server.refused(call)
        assert status == "UNIMPLEMENTED" and "tokenizer.json" in words


def test_the_digest_is_on_the_last_piece_alone() -> None:
    pieces = list(tokenizer_files.pieces(b"a" * (2 * tokenizer_files.PIECE), "digest"))
    assert [(len(data), digest) for data, digest in pieces] == [
        (tokenizer_files.PIECE, ""),
        (tokenizer_files.PIECE, "digest"),
    ]


async def check(server: Running, service: str = "") -> Any:
    stub = health_pb2_grpc.HealthStub(server.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


@in_loop
async def test_health_is_what_ready_says() -> None:
    async with running(start=False) as server:
        assert [await check(server, name) for name in ("", vllm_engine.NAME)] == [NOT_SERVING] * 2
        found = await server.stub.HealthCheck(pb.HealthCheckRequest())
        assert not found.healthy and found.message
        assert await server.status() == "UNAVAILABLE"
        await server.server.state.engine.supervisor.start()
        assert [await check(server, name) for name in ("", vllm_engine.NAME)] == [SERVING] * 2
        assert (await server.stub.HealthCheck(pb.HealthCheckRequest())).healthy
        listed = await health_pb2_grpc.HealthStub(server.channel).List(health_pb2.HealthListRequest())
        assert {name: found.status for name, found in listed.statuses.items()} == {
            "": SERVING,
            vllm_engine.NAME: SERVING,
        }
        unknown = health_pb2_grpc.HealthStub(server.channel).Check(health_pb2.HealthCheckRequest(service="x"))
        assert (await server.refused(unknown))[0] == "NOT_FOUND"


@in_loop
async def test_who_watches_health_hears_that_the_server_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "WATCH_S", 0.01)
    async with running() as server:
        watch = health_pb2_grpc.HealthStub(server.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        server.server.state.admission.lame_duck = True
        assert (await watch.read()).status == NOT_SERVING
        assert len(await server.generate()) > 1  # who has not heard of it is served
        watch.cancel()


@in_loop
async def test_a_server_that_drains_finishes_what_runs_and_ends_what_takes_too_long() -> None:
    for drain_s, ends in ((10.0, "well"), (0.05, "UNAVAILABLE")):
        async with running(drain_s=drain_s) as server:
            server.client.hold_before = 3
            call = asyncio.create_task(server.generate())
            await server.client.holding.wait()
            draining = asyncio.create_task(server.server._drain())
            await until(lambda: server.server.state.admission.draining)
            assert await check(server) == NOT_SERVING and await server.status() == "UNAVAILABLE"
            if ends == "well":
                server.client.proceeding.set()
                assert (await call)[-1].complete.finish_reason == "stop"
            else:
                with pytest.raises(grpc.aio.AioRpcError, match="shut down before"):
                    await call
            await draining


@in_loop
async def test_services_are_listed_by_reflection_and_their_messages_described() -> None:
    async with running() as server:
        stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        asked = reflection_pb2.ServerReflectionRequest
        wanted = [asked(list_services=""), asked(file_containing_symbol=vllm_engine.NAME)]
        services, file = [answer async for answer in stub.ServerReflectionInfo(iter(wanted))]
        names = {service.name for service in services.list_services_response.service}
        assert {vllm_engine.NAME, health.NAME} < names
        assert b"GenerateRequest" in file.file_descriptor_response.file_descriptor_proto[0]
