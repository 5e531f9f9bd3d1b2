"""Requests that a gateway sends for itself: whole answers for which no client waits."""

from __future__ import annotations

import asyncio

import aiohttp

from engine.contracts.config import GatewaySettings
from engine.http.gateway.probing import headers_for, timeout_of
from engine.http.gateway.reading import read_at_most
from engine.service.load import Share
from engine.service.promises import HEADER
from engine.service.targets import Target

PATH = "/v1/chat/completions"
MOST_BYTES = 256 * 1024
"""Of an answer."""


class NotAnswered(Exception):
    """A target has not answered. Its text says why, in a few words."""

    def __init__(self, why: str, status: int = 0) -> None:
        """``status``: that it answered; 0: none."""
        super().__init__(why)
        self.is_failure = status == 0 or status >= 500
        """It is the target that failed, and not the request that was refused."""


async def ask(
    session: aiohttp.ClientSession, settings: GatewaySettings, target: Target, body: bytes, tokens: int,
    request_id: str, limit_s: float, slo_class: str | None,
) -> bytes:  # fmt: skip
    """The bytes of an answer of status 200. ``tokens``: of the prompt, which count as the target's load.
    ``slo_class``: that an own target is asked for. Raises :class:`NotAnswered`."""
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "X-Request-Id": request_id}
    if slo_class is not None and target.provider is None:
        headers[HEADER] = slo_class
    share = Share(target.load, tokens, 0)
    try:
        async with (
            asyncio.timeout(limit_s),
            session.post(
                target.at_path(PATH),
                data=body,
                headers=headers | headers_for(target),
                timeout=timeout_of(settings),
                allow_redirects=False,
            ) as reply,
        ):
            data = await read_at_most(reply.content, MOST_BYTES)
            if reply.status in (401, 402, 403):
                target.refused_key(reply.status)
            if reply.status != 200:
                raise NotAnswered(f"status {reply.status}", reply.status)
            return data
    except TimeoutError:
        raise NotAnswered(f"no answer within {limit_s:g} s") from None
    except (aiohttp.ClientError, ConnectionError):
        raise NotAnswered("cannot be reached, or broke off") from None
    finally:
        share.end()
