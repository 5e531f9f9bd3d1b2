"""Whose key a request has: what it may do, and what it shares with others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.contracts.router import ToUrl

from ..service.fakes import in_loop
from ..service.test_keys import entry, written
from .fakes import Running, chat, running
from .gateway.fakes import Backend, backends, before, with_providers

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ENTRIES = [
    entry("ann", "key-of-ann", tenant="acme"),
    entry("bob", "key-of-bob", tenant="acme"),
    entry("eve", "key-of-eve"),
    entry("night", "key-of-night", priority=7, max_sequences=2),
    entry("root", "key-of-root", admin=True),
]


def key(name: str) -> str:
    return f"Authorization: Bearer key-of-{name}"


@asynccontextmanager
async def kept(folder: Path, **server: Any) -> AsyncIterator[Running]:
    """A server that tells keys apart."""
    async with running(keys=written(folder, ENTRIES), **server) as found:
        yield found


async def salt(server: Running, name: str, **fields: Any) -> str:
    status, _, data = await server.post(CHAT, chat(**fields), key(name))
    assert status == 200, data
    return server.client.requests[-1].cache_salt


@in_loop
async def test_only_keys_of_the_file_are_taken(tmp_path: Path) -> None:
    async with kept(tmp_path) as server:
        for lines in ([key("ann")], ["x-api-key: key-of-eve"]):
            assert (await server.post(CHAT, chat(), *lines))[0] == 200
        for lines in ([], [key("nobody")], [key("ann"), key("ann")], [f"Authorization: Bearer {ENTRIES[0]['sha256']}"]):
            assert (await server.post(CHAT, chat(), *lines))[0] == 401
        assert (await server.get("/health"))[0] == 200


@in_loop
async def test_the_key_of_the_configuration_goes_on_to_be_taken(tmp_path: Path) -> None:
    async with kept(tmp_path, api_key="main") as server:
        for line in ("Authorization: Bearer main", key("ann")):
            assert (await server.post(CHAT, chat(), line))[0] == 200
        assert (await server.get("/engine/plan", "Authorization: Bearer main"))[0] == 200
        assert server.client.requests[0].cache_salt == ""


@pytest.mark.parametrize("path", ["/engine/plan", "/engine/requests", "/engine/fleet", "/engine/stats", "/metrics"])
@in_loop
async def test_what_shows_all_tenants_is_for_administrators(tmp_path: Path, path: str) -> None:
    async with kept(tmp_path) as server:
        status, _, data = await server.get(path, key("ann"))
        assert status == 403 and json.loads(data)["error"]["code"] == "admin_only"
        assert (await server.get(path, key("root")))[0] in (200, 404)
        assert (await server.get("/v1/models", key("ann")))[0] == 200
        assert (await server.post("/engine/fleet/drain", b"", key("ann")))[0] == 403


@in_loop
async def test_the_keys_of_a_tenant_share_caches_and_those_of_others_never_do(tmp_path: Path) -> None:
    async with kept(tmp_path) as server:
        ann = await salt(server, "ann")
        assert ann == await salt(server, "bob") == await salt(server, "ann", user="u", cache_salt="")
        eve = await salt(server, "eve")
        theirs = [await salt(server, "eve", cache_salt=text) for text in ("acme", ann, "x")]
        assert len({ann, eve, *theirs, await salt(server, "ann", cache_salt="x")}) == 6


@in_loop
async def test_responses_are_stored_for_their_tenant(tmp_path: Path) -> None:
    async with kept(tmp_path) as server:
        status, _, data = await server.post(
            RESPONSES, {"model": "m", "input": "hi"} | {"model": chat()["model"]}, key("ann")
        )
        assert status == 200, data
        name = json.loads(data)["id"]
        for who, expected in (("ann", 200), ("bob", 200), ("eve", 404), ("root", 404)):
            assert (await server.get(f"/v1/responses/{name}", key(who)))[0] == expected
        body = {"model": chat()["model"], "input": "go on", "previous_response_id": name}
        assert [(await server.post(RESPONSES, body, key(who)))[0] for who in ("bob", "eve")] == [200, 404]


@in_loop
async def test_a_key_may_have_a_priority_that_its_requests_can_only_lower(tmp_path: Path) -> None:
    async with kept(tmp_path) as server:
        for asked, expected in ((None, 7), (9, 9)):
            assert (await server.post(CHAT, chat(priority=asked), key("night")))[0] == 200
            assert server.client.requests[-1].priority == expected
        status, _, data = await server.post(CHAT, chat(priority=6), key("night"))
        assert status == 400 and b"at least 7 (of its key)" in data
        assert (await server.post(CHAT, chat(priority=-1), key("ann")))[0] == 400


@in_loop
async def test_a_key_may_be_limited_and_others_are_not(tmp_path: Path) -> None:
    async with kept(tmp_path, trust_user=True) as server:
        server.client.hold_before = 0
        running_ones = [asyncio.create_task(server.post(CHAT, chat(user=user), key("night"))) for user in "ab"]
        while server.server.state.admission.in_flight < 2:
            await asyncio.sleep(0.005)
        status, headers, data = await server.post(CHAT, chat(user="c"), key("night"))
        assert status == 429 and b"key_limit" in data and "retry-after" in headers
        other = asyncio.create_task(server.post(CHAT, chat(), key("ann")))
        while server.server.state.admission.in_flight < 3:
            await asyncio.sleep(0.005)
        server.client.proceeding.set()
        assert [(await each)[0] for each in [*running_ones, other]] == [200] * 3
        assert (await server.post(CHAT, chat(n=3), key("night")))[0] == 429


@in_loop
async def test_the_tenants_of_keys_take_turns(tmp_path: Path) -> None:
    async with kept(tmp_path) as server:
        for name in ("ann", "bob", "eve"):
            assert (await server.post(CHAT, chat(user="u"), key(name)))[0] == 200
        assert [request.client for request in server.client.requests] == ["tenant:acme", "tenant:acme", "tenant:eve"]


@in_loop
async def test_keys_and_digests_are_shown_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with kept(tmp_path, api_key="main-key") as server:
        shown = [
            (await server.post(CHAT, chat(), line))[2] for line in (key("ann"), key("no-such"), "x-api-key: key-of-")
        ]
        for path in (
            "/engine/plan",
            "/engine/fleet",
            "/engine/requests",
            "/engine/counters",
            "/metrics",
            "/engine/stats",
        ):
            shown.append((await server.get(path, key("root")))[2])
    text = b"".join(shown).decode() + capsys.readouterr().out
    assert "key-of-" not in text and "main-key" not in text and not any(one["sha256"] in text for one in ENTRIES)
    assert "key=ann" in text, "the log names the key"


@in_loop
async def test_another_server_is_told_the_tenants_salt(tmp_path: Path) -> None:
    there = Backend("a")
    async with backends(there), kept(tmp_path) as server:
        server.router.decision = ToUrl(there.url)
        for name, fields in (("ann", {}), ("eve", {"cache_salt": "x"})):
            assert (await server.post(CHAT, chat(**fields), key(name)))[0] == 200
        salts = [json.loads(one.body)["cache_salt"] for one in there.asked]
        assert len(set(salts)) == 2 and "x" not in salts


@in_loop
async def test_a_gateway_keeps_tenants_apart_at_its_targets(tmp_path: Path) -> None:
    a, p = Backend("a"), Backend("p")
    path = written(tmp_path, ENTRIES)
    async with before(a, server={"keys": path}) as client:
        assert (await client.ask()).status == 401
        for name, fields in (("ann", {}), ("bob", {}), ("eve", {}), ("eve", {"cache_salt": "acme"})):
            assert (await client.ask(CHAT, True, key(name), **fields)).words == a.words
        salts = [json.loads(one.body)["cache_salt"] for one in a.asked]
        assert salts[0] == salts[1] and len(set(salts)) == 3
        assert (await client.ask(CHAT, True, key("night"), n=3)).status == 429
        status, _, _ = await client.request("GET", "/engine/fleet", None, key("ann"))
        assert status == 403
    async with with_providers(of={"p": (p, {"models": {"tiny": "t"}})}, server={"keys": path}) as client:
        assert (await client.ask(CHAT, True, key("ann"), cache_salt="x")).words == p.words
        assert "cache_salt" not in json.loads(p.asked[0].body)


@in_loop
async def test_each_prompt_counts_for_the_limit_of_a_key_at_a_gateway(tmp_path: Path) -> None:
    a = Backend("a")
    async with before(a, server={"keys": written(tmp_path, ENTRIES)}) as client:
        body = {"model": "tiny", "prompt": ["a", "b", "c"]}
        status, found = await client.post("/v1/completions", body, key("night"))
        assert (status, found["error"]["code"]) == (429, "key_limit") and not a.asked


@in_loop
async def test_a_gateway_tells_its_targets_the_priority_of_a_key(tmp_path: Path) -> None:
    a = Backend("a")
    async with before(a, server={"keys": written(tmp_path, ENTRIES)}) as client:
        for name, fields in (("night", {}), ("night", {"priority": None}), ("night", {"priority": 9}), ("ann", {})):
            assert (await client.ask(CHAT, True, key(name), **fields)).words == a.words
        assert [json.loads(one.body).get("priority") for one in a.asked] == [7, 7, 9, None]
        for urgent in (0, 6, -(10**30)):
            assert (await client.ask(CHAT, True, key("night"), priority=urgent)).status == 400
        assert len(a.asked) == 4


@in_loop
async def test_a_gateway_asks_its_targets_for_the_class_of_a_key(tmp_path: Path) -> None:
    a, p, asks = Backend("a"), Backend("p"), "X-SLO-Class: batch"
    path = written(tmp_path, [entry("ann", "key-of-ann", slo=["chat", "batch"]), entry("eve", "key-of-eve")])
    async with before(a, server={"keys": path}) as client:
        assert (await client.ask(CHAT, True, key("ann"))).words == a.words
        assert (await client.ask(CHAT, True, key("ann"), asks)).words == a.words
        assert (await client.ask(CHAT, True, key("eve"))).words == a.words
        assert (await client.ask(CHAT, True, key("eve"), asks)).status == 400
    assert [one.headers.get("x-slo-class") for one in a.asked] == ["chat", "batch", None]
    async with before(a) as client:
        assert (await client.ask(CHAT, True, asks)).words == a.words
    assert a.asked[-1].headers["x-slo-class"] == "batch"
    async with with_providers(of={"p": (p, {"models": {"tiny": "t"}})}, server={"keys": path}) as client:
        assert (await client.ask(CHAT, True, key("ann"))).words == p.words
    assert "x-slo-class" not in p.asked[0].headers
