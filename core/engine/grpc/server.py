"""A listener for gRPC over the same engines, queue and keys as HTTP."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server

from engine.contracts.config import GrpcSettings, ServerSettings
from engine.grpc import health, vllm_engine
from engine.grpc.calls import SPARE_CALLS, Calls, Method
from engine.grpc.errors import GrpcError
from engine.grpc.health import Health
from engine.grpc.peers import address_of
from engine.grpc.vllm_engine import VllmEngine
from engine.service.keys import client_name
from engine.service.transport import Backend, CannotListen

CALLS_PER_PLACE = 4
"""At most ``CALLS_PER_PLACE * server.max_queue + SPARE_CALLS`` calls are open; one more is refused unread. Those beyond
``server.max_queue`` are told so, with when to try again."""
MOST_CONNECTIONS = 1024
"""Further ones are closed: clients send many calls over one connection, and HTTP needs open files, too."""
HANDSHAKE_S = 10
"""A new connection must have begun to speak gRPC by then."""
IDLE_S = 600
"""A connection without calls is closed after so long; clients open another one by themselves."""
PING_S, PING_ANSWER_S = 60, 20
"""A connection that is silent for so long is asked whether it still is one."""


class Reflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]
    """The library's, for as many calls of one address as all methods without a key."""

    def __init__(self, names: Sequence[str], calls: Calls) -> None:
        super().__init__(names)
        self._calls = calls

    async def ServerReflectionInfo(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        try:
            with self._calls.place(client_name(None, address_of(context.peer())), keyless=True):
                async for answer in super().ServerReflectionInfo(requests, context):
                    yield answer
        except GrpcError as error:
            context.set_code(error.status)
            context.set_details(error.message)


class GrpcServer:
    """An :class:`engine.service.transport.Transport`. Call :meth:`start` once."""

    def __init__(self, backend: Backend) -> None:
        settings = backend.settings
        self._settings = settings
        self.calls = Calls(backend)
        options = options_of(settings)
        most = CALLS_PER_PLACE * settings.max_queue + SPARE_CALLS
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=most)
        self._add(vllm_engine.NAME, VllmEngine(self.calls).methods())
        self._add(health.NAME, Health(backend, (vllm_engine.NAME,)).methods())
        names = (vllm_engine.NAME, health.NAME, reflection.SERVICE_NAME)
        add_ServerReflectionServicer_to_server(Reflection(names, self.calls), self._server)
        self.address = ""

    async def start(self) -> None:
        """Raises :class:`CannotListen`."""
        target = target_of(self._settings)
        tls = credentials_of(self._settings.grpc)
        try:
            if tls is None:
                port = self._server.add_insecure_port(target)
            else:
                port = self._server.add_secure_port(target, tls)
        except RuntimeError:
            port = 0
        if not port:
            raise CannotListen(f"cannot listen on server.grpc.listen={self._settings.grpc.listen}. Choose another one.")
        await self._server.start()
        self.calls.start()
        self.address = target if target.startswith("unix:") else f"{target.rpartition(':')[0]}:{port}"

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and end those that are left after ``grace_s`` seconds."""
        await self._server.stop(grace_s)
        self.calls.close()

    def _add(self, name: str, methods: tuple[Method, ...]) -> None:
        handlers = {method.name: self.calls.handler(method) for method in methods}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


def options_of(settings: ServerSettings) -> tuple[tuple[str, Any], ...]:
    """Settings of the library that are chosen here and not left to it."""
    return (
        ("grpc.max_receive_message_length", settings.max_body_bytes),
        ("grpc.max_send_message_length", -1),  # an answer is bounded by what a request may ask for
        ("grpc.so_reuseport", 0),  # two servers on one port would share its calls, and nobody be told
        ("grpc.max_allowed_incoming_connections", min(MOST_CONNECTIONS, settings.max_connections or MOST_CONNECTIONS)),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_S * 1000),
        ("grpc.http2.settings_timeout", HANDSHAKE_S * 1000),
        ("grpc.max_connection_idle_ms", IDLE_S * 1000),
        ("grpc.keepalive_time_ms", PING_S * 1000),
        ("grpc.keepalive_timeout_ms", PING_ANSWER_S * 1000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),  # clients may ask as often, too
        ("grpc.keepalive_permit_without_calls", 1),
    )


def target_of(settings: ServerSettings) -> str:
    """As grpc spells addresses."""
    listen, host = settings.grpc.listen or "", settings.host
    if listen.isdigit():
        return f"{f'[{host}]' if ':' in host else host}:{listen}"
    return listen


def credentials_of(settings: GrpcSettings) -> Any:
    """Those of the files; ``None``: there is no TLS. Raises :class:`CannotListen`."""
    if settings.cert is None or settings.key is None:
        return None
    pair = (_read("key", settings.key), _read("cert", settings.cert))
    _check(settings)
    if settings.client_ca is None:
        return grpc.ssl_server_credentials([pair])
    authorities = _read("client_ca", settings.client_ca)
    return grpc.ssl_server_credentials([pair], authorities, require_client_auth=True)


def _check(settings: GrpcSettings) -> None:
    """grpc itself says of bad files that it cannot listen. Raises :class:`CannotListen`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    which: tuple[str, ...] = ("cert", "key")
    try:
        assert settings.cert is not None
        context.load_cert_chain(settings.cert, settings.key, password=lambda: "")
        if settings.client_ca is not None:
            which = ("client_ca",)
            context.load_verify_locations(settings.client_ca)
    except ssl.SSLError as error:
        names = " ".join([f"server.grpc.{name}={getattr(settings, name)}" for name in which])
        raise CannotListen(f"{names}: not usable as PEM: {error.reason or 'no certificate and key'}.") from None


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CannotListen(f"server.grpc.{name}={path}: {error.strerror or 'cannot be read'}") from None
