"""``grpc.health.v1``: should requests be sent here now? NOT_SERVING while the server drains, as ``/ready`` is 503."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc import StatusCode
from grpc_health.v1 import health_pb2 as pb

from engine.grpc.calls import Call, Method
from engine.grpc.errors import GrpcError
from engine.service.transport import Backend

NAME = "grpc.health.v1.Health"
WATCH_S = 0.5
"""How often a watched status is looked at."""


class Health:
    """Of a server whose services all serve or do not, together; the server itself is the service without a name."""

    def __init__(self, backend: Backend, services: tuple[str, ...]) -> None:
        self._backend = backend
        self._services = ("", *services)

    def methods(self) -> tuple[Method, ...]:
        return (
            Method("Check", pb.HealthCheckRequest, self._check, "open", is_probe=True),
            Method("Watch", pb.HealthCheckRequest, self._watch, "open", is_probe=True),
            Method("List", pb.HealthListRequest, self._list, "open", is_probe=True),
        )

    def _status(self) -> Any:
        kinds = pb.HealthCheckResponse
        return kinds.SERVING if self._backend.not_ready() is None else kinds.NOT_SERVING

    async def _check(self, call: Call) -> None:
        service = (await call.read()).service
        if service not in self._services:
            raise GrpcError(StatusCode.NOT_FOUND, "There is no such service on this server.", code="not_found")
        await call.write(pb.HealthCheckResponse(status=self._status()))

    async def _watch(self, call: Call) -> None:
        """A service that is not known may be, later: it is said to be unknown."""
        service, before = (await call.read()).service, None
        while True:
            status = self._status() if service in self._services else pb.HealthCheckResponse.SERVICE_UNKNOWN
            if status != before:
                await call.write(pb.HealthCheckResponse(status=status))
                before = status
            await asyncio.sleep(WATCH_S)

    async def _list(self, call: Call) -> None:
        await call.read()
        status = pb.HealthCheckResponse(status=self._status())
        await call.write(pb.HealthListResponse(statuses=dict.fromkeys(self._services, status)))
