"""Around every method: ``engine.grpc.calls``, ``engine.grpc.errors``, ``engine.grpc.peers``."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from grpc.aio import insecure_channel
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from smg_grpc_proto import vllm_engine_pb2 as pb

from engine.grpc import calls
from engine.grpc.errors import HTTP_STATUS, STATUS, status_of, trailing_metadata
from engine.grpc.peers import address_of
from engine.grpc.server import GrpcServer
from engine.http.errors import STATUS as OVER_HTTP
from engine.service.errors import ApiError, Rejected, bad_request

from ..service.fakes import in_loop
from ..service.test_keys import entry, written
from .fakes import request, running, tokens_of, until

GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
ENTRIES = [
    entry("ann", "key-of-ann", tenant="acme"),
    entry("bob", "key-of-bob", tenant="acme"),
    entry("eve", "key-of-eve"),
    entry("root", "key-of-root", admin=True),
]


def key(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer key-of-{name}"),)


@in_loop
async def test_only_keys_of_the_file_are_taken(tmp_path: Path) -> None:
    async with running(keys=written(tmp_path, ENTRIES), api_key="main") as server:
        for sent in (key("ann"), (("x-api-key", "key-of-eve"),), (("authorization", "Bearer main"),)):
            assert len(tokens_of(await server.generate(sent))) == 12
        for sent in ((), key("nobody"), key("ann") * 2, (("authorization", "key-of-ann"),), (("authorization", ""),)):
            status, words, more = await server.refused(server.stub.Generate(request(), metadata=sent))
            assert (status, more["error-code"]) == ("UNAUTHENTICATED", "invalid_api_key"), sent
            assert "key-of" not in words


@in_loop
async def test_all_methods_but_health_need_a_key_and_those_that_show_all_tenants_an_admins(tmp_path: Path) -> None:
    async with running(keys=written(tmp_path, ENTRIES)) as server:
        assert (await server.stub.HealthCheck(pb.HealthCheckRequest())).healthy
        of_admins = {
            server.stub.GetServerInfo: pb.GetServerInfoRequest(),
            server.stub.GetLoads: pb.GetLoadsRequest(),
        }
        for method, message in (of_admins | {server.stub.GetModelInfo: pb.GetModelInfoRequest()}).items():
            assert (await server.refused(method(message)))[0] == "UNAUTHENTICATED"
            await method(message, metadata=key("root"))
        for method, message in of_admins.items():
            assert (await server.refused(method(message, metadata=key("ann"))))[0] == "PERMISSION_DENIED"


@in_loop
async def test_the_key_is_looked_at_before_anything_of_the_message() -> None:
    async with running(api_key="main") as server:
        call = server.channel.stream_stream(GENERATE)()  # sends nothing, and does not say so
        assert (await server.refused(call))[0] == "UNAUTHENTICATED"


@in_loop
async def test_one_client_leaves_calls_for_others(tmp_path: Path) -> None:
    async with running(keys=written(tmp_path, ENTRIES), max_queue=1) as server:
        health, reflecting = HealthStub(server.channel), ServerReflectionStub(server.channel)
        held = [health.Watch(HealthCheckRequest()) for _ in range(calls.MOST_KEYLESS - 1)]
        for watch in held:
            await watch.read()
        asked = reflecting.ServerReflectionInfo()
        await asked.write(ServerReflectionRequest(list_services=""))
        assert await asked.read() is not grpc.aio.EOF
        for further in (reflecting.ServerReflectionInfo(), health.Check(HealthCheckRequest())):
            assert (await server.refused(further))[0] == "RESOURCE_EXHAUSTED"
        assert len(tokens_of(await server.generate(key("eve")))) == 12
        asked.cancel()
        for watch in held:
            watch.cancel()
        (transport,) = server.server.transports
        await until(lambda: not transport.calls.num_open)
        await health.Check(HealthCheckRequest())
        generate = server.channel.stream_stream(GENERATE)
        held = [generate(metadata=key("ann")) for _ in range(2 + calls.SPARE_CALLS)]  # they send nothing
        await until(lambda: transport.calls.num_open == len(held))
        refused = await server.refused(server.stub.Generate(request(), metadata=key("bob")))  # the same tenant's
        assert refused[2]["error-code"] == "many_calls"
        assert len(tokens_of(await server.generate(key("eve")))) == 12
        for call in held:
            call.cancel()


@in_loop
async def test_parameters_that_take_long_to_look_at_are_refused() -> None:
    async with running() as server:
        for params in ({"stop": ["abc"] * 60_000}, {"logit_bias": dict.fromkeys(range(40_000), 1.0)}):
            _, words, more = await server.refused(server.stub.Generate(request(**params)))
            assert more["error-param"] == "sampling_params" and "expected at most" in words


@in_loop
async def test_what_is_no_message_is_refused() -> None:
    async with running() as server:
        raw = server.channel.unary_stream(GENERATE)
        for data in (b"\xff\xff\xff\xff\x01", b"\x1a\x02\xff\xfe", b"\x12\x7f"):
            status, _, more = await server.refused(raw(data))
            assert (status, more["error-code"]) == ("INVALID_ARGUMENT", "no_message")
        call = server.channel.stream_stream(GENERATE)()
        await call.done_writing()
        assert (await server.refused(call))[0] == "INVALID_ARGUMENT"


@in_loop
async def test_fields_that_are_not_known_are_ignored() -> None:
    async with running() as server:
        data = request().SerializeToString() + b"\xfa\xff\x03\x03abc"
        assert [message async for message in server.channel.unary_stream(GENERATE)(data)]


@in_loop
async def test_a_message_larger_than_a_body_may_be_is_refused() -> None:
    async with running(max_body_bytes=10_000) as server:
        assert await server.status(text="a" * 9_000) == "INVALID_ARGUMENT"  # too long, but read
        assert await server.status(text="a" * 11_000) == "RESOURCE_EXHAUSTED"
        assert len(tokens_of(await server.generate())) == 12


@in_loop
async def test_a_message_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "READ_S", 0.05)
    async with running() as server:
        status, _, more = await server.refused(server.channel.stream_stream(GENERATE)())
        assert (status, more["error-code"]) == ("DEADLINE_EXCEEDED", "message_timeout")


@in_loop
async def test_a_method_or_service_that_is_not_there_is_unimplemented() -> None:
    async with running() as server:
        for path in ("/vllm.grpc.engine.VllmEngine/Nope", "/x.Y/Z"):
            assert (await server.refused(server.channel.unary_unary(path)(b"")))[0] == "UNIMPLEMENTED"
        assert (await server.refused(server.stub.Embed(pb.EmbedRequest())))[0] == "UNIMPLEMENTED"


@in_loop
async def test_a_request_is_aborted_by_the_name_that_its_own_client_gave_it(tmp_path: Path) -> None:
    async with running(keys=written(tmp_path, ENTRIES)) as server:
        server.client.hold_before = 3
        call = asyncio.create_task(server.refused(server.stub.Generate(request(), metadata=key("ann"))))
        await server.client.holding.wait()
        await server.stub.Abort(pb.AbortRequest(request_ids=["mine"]), metadata=key("eve"))
        await server.stub.Abort(pb.AbortRequest(request_ids=["other", ""]), metadata=key("ann"))
        assert not server.client.aborted
        await server.stub.Abort(pb.AbortRequest(request_ids=["mine", "gone"]), metadata=key("bob"))  # of one tenant
        status, _, more = await call
        assert (status, more["error-code"]) == ("CANCELLED", "aborted") and server.client.aborted
        await until(lambda: server.server.state.admission.in_flight == 0)


@in_loop
async def test_a_client_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "WRITE_S", 0.2)
    monkeypatch.setattr(calls, "LOOK_S", 0.05)
    narrow = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64 * 1024))
    async with running() as server, insecure_channel(server.address, narrow) as channel:
        server.client.hold_before = 3
        # megabytes: more than a connection takes unread
        asked = request("a" * 200, n=64, prompt_logprobs=20, max_tokens=20)
        call = channel.unary_stream(GENERATE)(asked.SerializeToString())
        await server.client.abort_seen.wait()
        await until(lambda: server.server.state.admission.in_flight == 0)
        status, _, more = await server.refused(call)  # it reads at last
        assert (status, more["error-code"]) == ("CANCELLED", "not_read")


@in_loop
async def test_what_fails_unexpectedly_is_said_without_saying_what(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as server:

        def broken(*_: Any) -> None:
            raise ZeroDivisionError("a secret of /etc/passwd")

        monkeypatch.setattr("engine.grpc.generating.make_job", broken)
        status, words, more = await server.refused(server.stub.Generate(request()))
        assert (status, words) == ("INTERNAL", "The server failed on this request.")
        assert more["error-code"] == "internal_error" and server.server.state.admission.in_flight == 0


@in_loop
async def test_nothing_is_kept_of_a_call_that_has_ended() -> None:
    async with running() as server:
        for _ in range(3):
            await server.generate()
            await server.status(text="")
        (transport,) = server.server.transports
        assert isinstance(transport, GrpcServer)
        await until(lambda: transport.calls.num_open == 0)
        gc.collect()
        assert [found for found in gc.get_objects() if isinstance(found, calls.Call)] == []


def test_every_kind_of_error_has_a_status_and_metrics_count_what_they_count_over_http() -> None:
    assert STATUS.keys() == OVER_HTTP.keys()
    same = {kind for kind, status in STATUS.items() if HTTP_STATUS[status] == OVER_HTTP[kind]}
    assert STATUS.keys() - same == {"conflict"}  # 409 is FAILED_PRECONDITION, which maps to 400


@pytest.mark.parametrize(
    ("status", "found"),
    [
        (400, StatusCode.INVALID_ARGUMENT),
        (403, StatusCode.PERMISSION_DENIED),
        (429, StatusCode.RESOURCE_EXHAUSTED),
        (500, StatusCode.UNAVAILABLE),
        (504, StatusCode.DEADLINE_EXCEEDED),
    ],
)
def test_a_router_refuses_with_the_status_that_it_names(status: int, found: StatusCode) -> None:
    assert status_of(Rejected(status, "no", None)) == found


def test_trailing_metadata_has_what_the_error_of_http_has() -> None:
    error = ApiError("overloaded", "full", param="n", code="queue_full", retry_after_s=3)
    assert trailing_metadata(error) == (("error-code", "queue_full"), ("error-param", "n"), ("retry-after", "3"))
    assert trailing_metadata(bad_request("no", "größe")) == ()  # metadata is ASCII


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.1:5000", "10.0.0.1"),
        ("ipv6:%5B::1%5D:5000", "::1"),
        ("ipv6:[fe80::1%25eth0]:5000", "fe80::1%eth0"),
        ("unix:/tmp/socket", "unix"),
        ("unix:", "unix"),
    ],
)
def test_the_address_of_a_peer(peer: str, address: str) -> None:
    assert address_of(peer) == address
