"""Where gRPC listens, and with what: ``engine.grpc.server``, ``engine.grpc.opening``."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as stubs

from engine.assembly.errors import AssemblyError
from engine.contracts.config import GrpcSettings, ServerSettings
from engine.grpc import opening
from engine.grpc.server import options_of, target_of
from engine.http.server import Server

from ..http.fakes import completion
from ..needs import needs_openssl
from ..service.fakes import HELLO, DirectRouter, ScriptedClient, in_loop, make_plan, make_tokenizer
from .fakes import Running, running, tokens_of


@in_loop
async def test_http_and_grpc_answer_beside_each_other() -> None:
    async with running() as server:
        assert len(tokens_of(await server.generate())) == 12
        assert (await server.post("/v1/completions", completion()))[0] == 200


@in_loop
async def test_a_unix_socket_is_listened_on(tmp_path: Path) -> None:
    async with running(listen=f"unix:{tmp_path}/grpc") as server:
        assert server.address == f"unix:{tmp_path}/grpc"
        assert len(tokens_of(await server.generate())) == 12
        assert server.client.requests[-1].client == "address:unix"


async def refusal(**grpc_settings: Any) -> str:
    """What a server says that cannot listen."""
    plan, lines = make_plan(grpc=GrpcSettings(**grpc_settings)), list[str]()
    opened = opening.grpc_transport(plan.settings.server)
    assert opened is not None
    parts = plan, {"default": ScriptedClient(HELLO)}, DirectRouter(), [], make_tokenizer()
    server = Server(*parts, beside=[opened], say=lines.append)
    assert await server.run() == 1
    with socket.socket() as again:  # HTTP listens no more
        again.bind(("127.0.0.1", server.port))
    return lines[-1]


@in_loop
async def test_a_port_that_is_taken_is_named_with_the_setting_to_change() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        assert await refusal(listen=listen) == (
            f"error: cannot listen on server.grpc.listen={listen}. Choose another one."
        )


@in_loop
async def test_two_servers_do_not_share_a_port() -> None:
    async with running() as server:
        assert "cannot listen" in await refusal(listen=server.address)


@in_loop
async def test_files_of_tls_that_are_not_there_are_named(tmp_path: Path) -> None:
    said = await refusal(listen="127.0.0.1:0", cert=f"{tmp_path}/c.pem", key=f"{tmp_path}/k.pem")
    assert said == f"error: server.grpc.key={tmp_path}/k.pem: No such file or directory"


@in_loop
async def test_files_of_tls_that_are_none_are_refused(tmp_path: Path) -> None:
    for name in ("c", "k"):
        (tmp_path / name).write_text("no PEM")
    assert "server.grpc.cert" in await refusal(listen="127.0.0.1:0", cert=f"{tmp_path}/c", key=f"{tmp_path}/k")


def certificate(folder: Path) -> tuple[bytes, bytes]:
    """Of an authority that certifies itself, for ``localhost``."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run([*command.split(), *names], cwd=folder, check=True, capture_output=True, timeout=20)
    return (folder / "cert.pem").read_bytes(), (folder / "key.pem").read_bytes()


async def ask(server: Running, credentials: grpc.ChannelCredentials | None) -> str:
    """``healthy``, or why not."""
    to = server.address
    channel = grpc.aio.insecure_channel(to) if credentials is None else grpc.aio.secure_channel(to, credentials)
    async with channel:
        try:
            await stubs.VllmEngineStub(channel).HealthCheck(pb.HealthCheckRequest(), timeout=5)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "healthy"


@needs_openssl
@in_loop
async def test_with_files_of_tls_only_tls_is_taken_and_with_an_authority_only_its_clients(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    plain = grpc.ssl_channel_credentials(cert)
    mutual = grpc.ssl_channel_credentials(cert, key, cert)
    files = {"cert": f"{tmp_path}/cert.pem", "key": f"{tmp_path}/key.pem"}
    for settings, found in (
        (GrpcSettings("127.0.0.1:0", **files), ["UNAVAILABLE", "healthy", "healthy"]),
        (GrpcSettings("127.0.0.1:0", **files, client_ca=files["cert"]), ["UNAVAILABLE", "UNAVAILABLE", "healthy"]),
    ):
        async with running(grpc=settings) as server:
            assert [await ask(server, each) for each in (None, plain, mutual)] == found


@pytest.mark.parametrize(
    ("host", "listen", "target"),
    [
        ("127.0.0.1", "50051", "127.0.0.1:50051"),
        ("::1", "50051", "[::1]:50051"),
        ("0.0.0.0", "localhost:1", "localhost:1"),
        ("127.0.0.1", "[::]:1", "[::]:1"),
        ("127.0.0.1", "unix:/run/engine", "unix:/run/engine"),
    ],
)
def test_where_it_listens(host: str, listen: str, target: str) -> None:
    assert target_of(ServerSettings(host=host, grpc=GrpcSettings(listen))) == target


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"listen": "nowhere"}, "expected HOST:PORT"),
        ({"listen": ""}, "expected HOST:PORT"),
        ({"listen": "70000"}, "expected HOST:PORT"),
        ({"listen": "[::1]:65536"}, "expected HOST:PORT"),
        ({"listen": "http://127.0.0.1:1"}, "expected HOST:PORT"),
        ({"listen": "127.0.0.1:1", "cert": "c"}, "belong together"),
        ({"listen": "127.0.0.1:1", "client_ca": "c"}, "needs server.grpc.cert"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GrpcSettings(**settings)


def test_limits_of_the_library_are_chosen() -> None:
    options = dict(options_of(ServerSettings(max_body_bytes=1234)))
    assert options["grpc.max_receive_message_length"] == 1234 and options["grpc.so_reuseport"] == 0


@in_loop
async def test_connections_beyond_the_limit_are_closed_and_calls_on_open_ones_go_on() -> None:
    async with running(max_connections=3) as server:
        assert len(tokens_of(await server.generate())) == 12
        host, port = server.address.split(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(8)]
        ended = await asyncio.gather(*[asyncio.wait_for(_ended(reader), 5) for reader, _ in opened])
        assert sum(ended) >= 6
        assert len(tokens_of(await server.generate())) == 12
        for _, writer in opened:
            writer.close()


async def _ended(reader: asyncio.StreamReader) -> bool:
    """Whether the other end closes at once; one that goes on sends its settings first."""
    try:
        return await reader.read(1) == b""
    except ConnectionError:
        return True


def test_nothing_is_opened_that_nobody_asked_for() -> None:
    assert opening.grpc_transport(ServerSettings()) is None


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str, found: Callable[[str], Any] = opening.find_spec) -> Any:
        return None if name in ("grpc", "smg_grpc_proto") else found(name)

    monkeypatch.setattr(opening, "find_spec", nothing)
    assert opening.grpc_transport(ServerSettings()) is None
    with pytest.raises(AssemblyError, match=r"grpc, smg_grpc_proto is not installed: pip install 'engine\[grpc\]'"):
        opening.grpc_transport(ServerSettings(grpc=GrpcSettings("127.0.0.1:0")))
