"""An engine of this server, read without HTTP."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from engine.http.routes.counters import read_counters
from engine.http.routes.latency import read_latency
from engine.http.routes.plan import read_plan
from engine.http.routes.requests import read_recent, read_request
from engine.http.routes.stats import read_stats
from engine.http.state import ServerState
from engine.service.errors import ApiError

REQUESTS = "/engine/requests/"


class OwnEngine:
    """An :class:`~engine.contracts.findings.EngineReader`."""

    def __init__(self, state: ServerState, engine: str | None = None) -> None:
        """``engine``: its id, ``None``: the first one. Raises :class:`ApiError` ``not_found``."""
        self._state, self.id = state, state.engine_of(engine).id

    async def json(self, path: str) -> Any:
        """Raises ``ValueError``."""
        try:
            return msgspec.to_builtins(await self._read(path))
        except ApiError as error:
            raise ValueError(f"{path}: {error}") from error

    async def _read(self, path: str) -> Any:
        where, state, engine = urlsplit(path), self._state, self.id
        match where.path:
            case "/engine/plan":
                return read_plan(state, engine)
            case "/engine/stats":
                return await read_stats(state, engine)
            case "/engine/counters":
                return await read_counters(state, engine)
            case "/engine/latency":
                return await read_latency(state, engine)
            case "/engine/requests":
                return await read_recent(state, dict(parse_qsl(where.query)), engine)
            case one if one.startswith(REQUESTS):
                return await read_request(state, one.removeprefix(REQUESTS))
        raise ValueError(f"{path}: there is no such path to read")
