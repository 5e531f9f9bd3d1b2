"""Web pages of the origins that the operator lists may call the server; those of others may not."""

from __future__ import annotations

import asyncio
import json

import pytest

from engine.contracts.config import ServerSettings

from ..service.fakes import in_loop
from .fakes import chat, running

CHAT = "/v1/chat/completions"
PAGE = "https://chat.example.org"
ORIGIN = f"Origin: {PAGE}"
JSON = "Content-Type: application/json"
ASKS = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization,x-stainless-os")
ALLOWED = "access-control-allow-origin"


@in_loop
async def test_no_origin_is_allowed_by_default() -> None:
    async with running() as server:
        status, headers, _ = await server.post(CHAT, b"", ORIGIN, *ASKS, method="OPTIONS")
        assert status == 405 and ALLOWED not in headers
        status, headers, _ = await server.post(CHAT, chat(), ORIGIN, JSON)
        assert status == 200 and ALLOWED not in headers and "Origin" not in headers.get("vary", "")


@in_loop
async def test_a_preflight_of_a_listed_origin_needs_no_key() -> None:
    async with running(api_key="k", cors_origins=["http://localhost:3000", PAGE]) as server:
        status, headers, data = await server.post(CHAT, b"", ORIGIN, *ASKS, method="OPTIONS")
        assert (status, data) == (204, b"")
        assert {name: value for name, value in headers.items() if name.startswith("access-control")} == {
            ALLOWED: PAGE,
            "access-control-allow-methods": "GET, POST, DELETE",
            "access-control-allow-headers": "authorization,x-stainless-os",
            "access-control-max-age": "600",
            "access-control-expose-headers": "X-Request-Id, Retry-After, traceresponse",
        }
        assert headers["vary"] == "Origin"
        for other in ("https://evil.example", PAGE + ".evil.example", "http://chat.example.org", "null"):
            status, headers, _ = await server.post(CHAT, b"", f"Origin: {other}", *ASKS, method="OPTIONS")
            assert status == 401 and ALLOWED not in headers and headers["vary"] == "Origin"
        assert (await server.post(CHAT, b"", ORIGIN, method="OPTIONS"))[0] == 401  # not a preflight


@in_loop
async def test_answers_streams_and_errors_name_the_origin() -> None:
    key = "x-api-key: k"
    async with running(api_key="k", cors_origins=[PAGE]) as server:
        for body, headers_sent, status in (
            (chat(), (key, JSON), 200),
            (chat(stream=True), (key, JSON), 200),
            (chat(nonsense=1), (key, JSON), 400),
            (chat(nonsense="x" * 2000), (key, JSON, "Accept-Encoding: gzip"), 400),
            (chat(), (JSON,), 401),
            (chat(), (key, "Content-Type: text/plain"), 415),
        ):
            got, headers, _ = await server.post(CHAT, body, ORIGIN, *headers_sent)
            assert (got, headers[ALLOWED]) == (status, PAGE)
            assert "Origin" in headers["vary"] and "access-control-allow-credentials" not in headers
        status, headers, _ = await server.get("/nowhere", ORIGIN, key)
        assert (status, headers[ALLOWED]) == (404, PAGE)
        status, headers, _ = await server.get("/nowhere", key)
        assert ALLOWED not in headers


@in_loop
async def test_a_stream_that_fails_names_the_origin() -> None:
    async with running(cors_origins=[PAGE]) as server:
        server.client.hold_before = 1
        asked = asyncio.create_task(server.post(CHAT, chat(stream=True), ORIGIN, JSON))
        await server.client.holding.wait()
        server.client.die()
        status, headers, data = await asked
        assert (status, headers[ALLOWED]) == (200, PAGE) and b"engine_dead" in data


@in_loop
async def test_a_star_allows_pages_of_any_origin() -> None:
    async with running(cors_origins=["*"]) as server:
        status, headers, data = await server.get("/v1/models", "Origin: https://a.example")
        assert (status, headers[ALLOWED]) == (200, "*") and "vary" not in headers and json.loads(data)["data"]


@pytest.mark.parametrize(
    "origin", ["", "chat.example.org", PAGE + "/", PAGE + "/x", "https://Chat.example.org", "null"]
)
def test_what_is_no_origin_is_refused_at_start(origin: str) -> None:
    with pytest.raises(ValueError, match=r"server\.cors_origins"):
        ServerSettings(cors_origins=[origin])
