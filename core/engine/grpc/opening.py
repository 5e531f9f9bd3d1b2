"""Whether a server listens for gRPC, and whether it can. This module imports nothing of gRPC."""

from __future__ import annotations

from importlib.util import find_spec

from engine.assembly.errors import AssemblyError
from engine.contracts.config import ServerSettings
from engine.service.transport import Backend, Listen, Transport

NEEDED = ("grpc", "google.protobuf", "grpc_health", "grpc_reflection", "smg_grpc_proto")
"""Packages of the extra ``engine[grpc]``."""


def grpc_transport(settings: ServerSettings) -> Listen | None:
    """What opens the transport; ``None``: it is not asked for. Raises :class:`AssemblyError` where the extra is not
    installed."""
    if settings.grpc.listen is None:
        return None
    if missing := [name for name in NEEDED if not _is_there(name)]:
        raise AssemblyError(
            [
                f"server.grpc.listen={settings.grpc.listen} needs the extra grpc, of which {', '.join(missing)} is not "
                "installed: pip install 'engine[grpc]', or leave server.grpc.listen out"
            ]
        )
    return _listen


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


async def _listen(backend: Backend) -> Transport:
    from engine.grpc.server import GrpcServer

    server = GrpcServer(backend)
    await server.start()
    return server
