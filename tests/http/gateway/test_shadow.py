"""Some answers of a smaller model are compared with those of the largest one, at nobody's cost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.contracts.config import GatewaySettings, ShadowSettings
from engine.counters.gateway import AGREEMENT, COST, REQUESTS, SHADOWS
from engine.http.gateway.shadow import MOST_BODY_BYTES, text_of

from ...service.fakes import in_loop
from ...service.test_keys import entry, written
from .fakes import (
    CHAT,
    MESSAGES,
    NDJSON,
    Backend,
    Client,
    Exchange,
    Fault,
    before,
    chunk,
    hang,
    stream_of,
    until,
    whole_of,
    with_providers,
    words_of,
)

NAMES = {"auto": ["small", "large"]}
ALL = {"models": NAMES, "shadow": {"auto": ShadowSettings(share=1.0)}}


def says(name: str) -> Fault:
    """What a server of this name says."""

    async def fault(exchange: Exchange) -> None:
        exchange.stream = stream_of(exchange.asked.path, words_of(name))
        exchange.whole = whole_of(exchange.asked.path, words_of(name))
        await exchange.answer()

    return fault


async def results(client: Client) -> Mapping[str, float]:
    return (await client.counted(SHADOWS)).get("auto", {})


async def until_counted(client: Client, **expected: int) -> None:
    async with asyncio.timeout(10):
        while await results(client) != expected:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@in_loop
async def test_answers_are_compared_after_the_client_has_its_own(stream: bool) -> None:
    small, large = Backend("s", models=("small",)), Backend("l", [says("s")], models=("large",))
    async with before(small, large, **ALL) as client:
        assert (await client.ask(stream=stream, model="auto", seed=7)).words == small.words
        await until_counted(client, agrees=1)
        body = json.loads(large.asked[0].body)
        assert (body["model"], body["seed"], body["stream"]) == ("large", 7, False)
        assert (await client.ask(stream=stream, model="auto")).words == small.words
        await until_counted(client, agrees=1, differs=1)
        found = (await client.counted(AGREEMENT))["auto"]
        assert found == pytest.approx({"low": 0.0945, "share": 0.5, "high": 0.9055}, abs=1e-3)
        shown = (await client.json("/engine/names"))["names"]["auto"]["shadow"]["small"]
        assert shown == {"agrees": 1, "differs": 1, "failed": 0, "dropped": 0, "agreement": found}
        assert (await client.counted(REQUESTS))[large.id] == {}, "no request of a client's"


@pytest.mark.parametrize("fields", [{"tools": [{}]}, {"tools": [{"x": "y" * 5000}]}, {"functions": [{}]}, {"n": 2}])
@in_loop
async def test_what_cannot_be_compared_is_not(fields: dict[str, Any]) -> None:
    small, large = Backend("s", models=("small",)), Backend("l", models=("large",))
    async with before(small, large, **ALL) as client:
        assert (await client.ask(model="auto", **fields)).words == small.words
        assert (await client.ask(MESSAGES, model="auto")).words == small.words
        assert (await client.ask(model="large")).words == large.words and (await client.ask(model="small")).words
        long = [{"role": "user", "content": "x" * MOST_BODY_BYTES}]
        assert (await client.ask(model="auto", messages=long)).words == small.words
        await asyncio.sleep(0.05)
        assert len(large.asked) == 1 and await results(client) == {}


@in_loop
async def test_without_being_asked_for_nothing_is_compared() -> None:
    small, large = Backend("s", models=("small",)), Backend("l", models=("large",))
    async with before(small, large, models=NAMES, shadow={"auto": ShadowSettings()}) as client:
        assert (await client.ask(model="auto")).words == small.words
        await asyncio.sleep(0.05)
        assert not large.asked and "shadow" not in (await client.json("/engine/names"))["names"]["auto"]


@in_loop
async def test_a_shadow_is_sent_on_the_terms_of_its_client(tmp_path: Path) -> None:
    small, large = Backend("s", models=("small",)), Backend("l", models=("large",))
    path = written(tmp_path, [entry("night", "k", priority=7, slo=["batch"])])
    async with before(small, large, server={"keys": path}, **ALL) as client:
        assert (await client.ask(CHAT, True, "Authorization: Bearer k", model="auto")).words == small.words
        await until(lambda: bool(large.asked))
        (asked,), body = small.asked, json.loads(large.asked[0].body)
        assert large.asked[0].headers["x-slo-class"] == "batch" and body["priority"] == 7
        assert body["cache_salt"] == json.loads(asked.body)["cache_salt"]


@in_loop
async def test_a_busy_model_is_left_alone() -> None:
    small, large = Backend("s", models=("small",)), Backend("l", [hang], models=("large",))
    async with before(small, large, **ALL) as client:
        asking = asyncio.create_task(client.ask(model="large"))
        await until(lambda: len(large.asked) == 1)
        assert (await client.ask(model="auto")).words == small.words
        await until_counted(client, dropped=1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert len(large.asked) == 1


@in_loop
async def test_a_request_of_a_client_ends_a_shadow_where_it_arrives() -> None:
    small, large = Backend("s", models=("small",)), Backend("l", [hang], models=("large",))
    async with before(small, large, **ALL) as client:
        assert (await client.ask(model="auto")).words == small.words
        await until(lambda: len(large.asked) == 1)

        async def slow(exchange: Exchange) -> None:
            await large.left.wait()
            await exchange.answer()

        large.then = slow
        assert (await client.ask(model="large")).words == large.words
        await until_counted(client, dropped=1)


@in_loop
async def test_shadows_are_bounded_and_end_with_the_gateway() -> None:
    small, large = Backend("s", models=("small",)), Backend("l", then=hang, models=("large",))
    other = Backend("o", then=hang, models=("large",))
    settings = {"auto": ShadowSettings(share=1.0, most=1)}
    async with before(small, large, other, models=NAMES, shadow=settings) as client:
        for _ in range(3):
            assert (await client.ask(model="auto")).words == small.words
        await until_counted(client, dropped=2)
        assert len(large.asked) + len(other.asked) == 1
        await client.gateway.close()
        assert client.loads == [(0, 0, 0)] * 3


async def no_chat(exchange: Exchange) -> None:
    await exchange.reply(200, b'{"choices": "none"}')


async def fails(exchange: Exchange) -> None:
    await exchange.refuse(500, "some_code")


@pytest.mark.parametrize("fault", [no_chat, fails])
@in_loop
async def test_a_shadow_that_fails_is_counted_and_harms_nothing(fault: Fault) -> None:
    small, large = Backend("s", models=("small",)), Backend("l", [fault] * 4, models=("large",))
    async with before(small, large, **ALL) as client:
        for count in range(1, 5):
            assert (await client.ask(model="auto")).words == small.words
            await until_counted(client, failed=count)
        assert client.target(large).takes_requests and AGREEMENT.name not in str(await client.counted(AGREEMENT))
        assert (await client.json("/engine/names"))["names"]["auto"]["shadow"]["small"]["agreement"] is None


@in_loop
async def test_an_answer_that_failed_is_not_compared() -> None:
    async def breaks(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.pieces(*exchange.stream[:3])
        exchange.cut()

    small, large = Backend("s", [breaks], models=("small",)), Backend("l", models=("large",))
    async with before(small, large, **ALL) as client:
        assert (await client.ask(model="auto")).kind == "error"
        await asyncio.sleep(0.05)
        assert not large.asked and await results(client) == {}


@in_loop
async def test_a_shadow_has_the_salt_of_its_tenant(tmp_path: Any) -> None:
    import hashlib

    keys = [{"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()} for name in ("one", "two")]
    (tmp_path / "keys.yaml").write_text(json.dumps(keys))
    small, large = Backend("s", models=("small",)), Backend("l", models=("large",))
    async with before(small, large, server={"keys": str(tmp_path / "keys.yaml")}, **ALL) as client:
        for name in ("one", "two"):
            await client.ask(CHAT, True, f"Authorization: Bearer {name}", model="auto", cache_salt="mine")
            await until(lambda: len(small.asked) == len(large.asked) and client.loads == [(0, 0, 0)] * 2)
        salts = [[json.loads(one.body)["cache_salt"] for one in server.asked] for server in (small, large)]
        assert salts[0] == salts[1] and len({*salts[0], "mine"}) == 3


@in_loop
async def test_a_provider_is_asked_by_name_only_and_paid_for() -> None:
    async def answers(exchange: Exchange) -> None:
        usage = {"prompt_tokens": 1, "completion_tokens": 3}
        await exchange.reply(200, json.dumps(json.loads(exchange.whole) | {"usage": usage}).encode())

    small, p = Backend("s", models=("small",)), Backend("p", then=answers)
    of = {"p": (p, {"models": {"large": "their/large"}, "output_price": 1e6})}
    async with with_providers(small, of=of, **ALL) as client:
        await client.ask(model="auto")
        await until_counted(client, dropped=1)
        assert not p.asked
    paid = {"models": NAMES, "shadow": {"auto": ShadowSettings(share=1.0, provider="p")}}
    async with with_providers(small, of=of, **paid) as client:
        await client.ask(model="auto")
        await until_counted(client, differs=1)
        assert json.loads(p.asked[0].body)["model"] == "their/large"
        assert (await client.counted(COST))["p"] == {"": 3.0}


@pytest.mark.parametrize(
    ("models", "settings", "said"),
    [
        ({}, ShadowSettings(0.1), "gateway.shadow.auto: expected a name"),
        ({"auto": ["a"]}, ShadowSettings(0.1), "gateway.shadow.auto: expected a name"),
        (NAMES, ShadowSettings(1.1), "gateway.shadow.auto.share=1.1"),
        (NAMES, ShadowSettings(0.1, "p"), "gateway.shadow.auto.provider=p: expected a provider that has the largest"),
    ],
)
def test_wrong_settings_are_refused(models: dict[str, list[str]], settings: ShadowSettings, said: str) -> None:
    with pytest.raises(ValueError) as refused:
        GatewaySettings(models=models, shadow={"auto": settings})
    assert said in str(refused.value)


def test_the_text_of_a_chat_is_read_whole_and_streamed() -> None:
    events = (
        chunk({"role": "assistant"}) + b": alive\n\n" + chunk({"content": "a b"}) + chunk({"content": " c"}, "stop")
    )
    assert text_of(events + b"data: [DONE]\n\n", streams=True) == "a b c"
    assert text_of(b'{"choices": [{"message": {"content": "a"}}]}') == "a"
    assert text_of(b'{"choices": [{"message": {"content": null}}]}') == ""
    for data in (b"", b"{}", b"[]", b"\xff", b'{"choices": [7]}', NDJSON.encode()):
        assert text_of(data) is None
