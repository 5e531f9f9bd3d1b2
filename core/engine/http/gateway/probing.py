"""Whether targets are ready, and which models they have: asked again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec
import structlog

from engine.contracts.config import GatewaySettings
from engine.http.gateway.reading import NoAnswer, read_at_most
from engine.http.gateway.state import GatewayState
from engine.service.targets import Target

MODELS_S = 10.0
"""The models of a target that stays ready are read again this often."""
MOST_BYTES = 4 * 1024 * 1024
"""Of an answer to a probe."""
MOST_SILENT = 3
"""A target that has not answered so many probes in a row is down, and loses what it has not begun. One that answers one
of them late is only busy."""

log = structlog.get_logger("engine.gateway")


async def probe(state: GatewayState) -> None:
    """Ask all own targets, until cancelled. Providers are not asked, only what they have begun is watched."""
    async with asyncio.TaskGroup() as probing:
        for target in state.targets.values():
            probing.create_task(_probe_one(state, target) if target.provider is None else _watch_one(state, target))


async def _watch_one(state: GatewayState, target: Target) -> None:
    while True:
        target.watch(asyncio.get_running_loop().time())
        await asyncio.sleep(state.gateway.probe_s)


async def _probe_one(state: GatewayState, target: Target) -> None:
    silent, asked_s, clock = 0, -MODELS_S, asyncio.get_running_loop().time
    while True:
        before = target.state
        try:
            async with asyncio.timeout(max(1.0, state.gateway.probe_s)):
                why_not = await _why_not_ready(state, target)
                if why_not is None and (target.state != "ready" or clock() - asked_s >= MODELS_S):
                    target.is_ready(await _models(state, target))
                    asked_s = clock()
            silent = 0
            if why_not is not None:
                target.is_down(why_not, lets_go=False)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            silent += 1
            if silent >= MOST_SILENT or not isinstance(error, TimeoutError):
                target.is_down(_words(error), lets_go=silent >= MOST_SILENT)
        if target.state != before:
            log.info("target changes", target=target.id, state=target.state, models=[*target.models])
        target.watch(clock())
        await asyncio.sleep(state.gateway.probe_s)


def headers_for(target: Target) -> dict[str, str]:
    """With its key, if it has one."""
    return {} if target.key is None else {"Authorization": f"Bearer {target.key}"}


def timeout_of(settings: GatewaySettings) -> aiohttp.ClientTimeout:
    """Connecting alone has a limit: what answers take is watched otherwise."""
    return aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_s)


async def _why_not_ready(state: GatewayState, target: Target) -> str | None:
    """``None``: it is. A server without ``/ready`` is ready while it answers."""
    assert state.session is not None
    async with state.session.get(target.url + "/ready", headers=headers_for(target), allow_redirects=False) as reply:
        await read_at_most(reply.content, MOST_BYTES)
        return None if reply.status in (200, 404) else f"/ready says {reply.status}"


async def _models(state: GatewayState, target: Target) -> Mapping[str, Mapping[str, Any]]:
    """Raises ``ValueError`` where that is no list of models."""
    assert state.session is not None
    async with state.session.get(
        target.url + "/v1/models", headers=headers_for(target), allow_redirects=False
    ) as reply:
        data = await read_at_most(reply.content, MOST_BYTES)
        if reply.status != 200:
            raise ValueError(f"/v1/models says {reply.status}")
    try:
        found = msgspec.json.decode(data)["data"]
        return {str(model["id"]): model for model in found}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        raise ValueError("/v1/models is no list of models") from None


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "does not answer"
    if isinstance(error, NoAnswer):
        return f"a page {error}"
    return str(error) if isinstance(error, ValueError) and not isinstance(error, OSError) else "cannot be reached"
