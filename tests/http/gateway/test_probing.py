"""Targets are asked whether they are ready, and which models they have."""

from __future__ import annotations

import asyncio

import pytest

from engine.http.gateway import probing

from ...service.fakes import in_loop
from .fakes import Backend, before, hang, until

assert probing.__name__ == "engine.http.gateway.probing"


@in_loop
async def test_a_target_without_a_page_that_says_so_is_ready_while_it_answers() -> None:
    a = Backend("a", has_ready=False)
    async with before(a) as client:
        assert (await client.ask()).words == a.words
        assert {one.path for one in a.probed} == {"/ready", "/v1/models"}


@in_loop
async def test_a_target_that_says_it_is_not_ready_gets_nothing_until_it_is() -> None:
    a, b = Backend("a", ready_status=503), Backend("b")
    async with before(a, b, waits=False) as client:
        await until(lambda: client.target(b).takes_requests and client.target(a).state == "/ready says 503")
        assert (await client.ask()).words == b.words
        a.ready_status = 200
        await until(lambda: client.target(a).takes_requests)
        assert (await client.ask()).words == a.words


@in_loop
async def test_a_target_that_comes_back_has_started_again() -> None:
    a, b = Backend("a"), Backend("b")
    async with before(a, b) as client:
        target = client.target(a)
        target.breaker.failures = 2
        assert target.starts == 1
        await a.stop()
        await until(lambda: target.why_not == "cannot be reached")
        assert (await client.ask()).words == b.words
        await a.start()
        await until(lambda: target.takes_requests)
        assert (target.starts, target.breaker.failures, client.target(b).starts) == (2, 0, 1)
        assert target.view("tiny", alive=True).starts == 2
        assert (await client.ask()).words == a.words


@in_loop
async def test_a_target_that_does_not_answer_probes_loses_what_it_has_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probing, "MOST_SILENT", 1)
    a, b = Backend("a", then=hang), Backend("b")
    async with before(a, b) as client:
        asked = asyncio.create_task(client.ask())
        await until(lambda: bool(a.asked))
        a.is_deaf = True
        outcome = await asked
        assert (outcome.words, outcome.headers["x-attempt"]) == (b.words, "2")
        assert client.target(a).why_not == "does not answer"


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ((500, b"{}"), "/v1/models says 500"),
        ((200, b"hello"), "/v1/models is no list of models"),
        ((200, b"[]"), "/v1/models is no list of models"),
        ((200, b'{"data": null}'), "/v1/models is no list of models"),
        ((200, b'{"data": ["tiny"]}'), "/v1/models is no list of models"),
        ((200, b'{"data": [{"name": "tiny"}]}'), "/v1/models is no list of models"),
        ((200, b"\xff"), "/v1/models is no list of models"),
        ((200, b'{"data": [{"id": "\xed\xa0\x80"}]}'), "/v1/models is no list of models"),
        ((200, b"[" * 100_000), "/v1/models is no list of models"),
        ((200, b" " * (probing.MOST_BYTES + 1)), f"a page says more than {probing.MOST_BYTES} bytes"),
    ],
)
@in_loop
async def test_a_target_that_does_not_tell_its_models_is_not_ready(reply: tuple[int, bytes], why: str) -> None:
    a = Backend("a", models_reply=reply)
    async with before(a, waits=False) as client:
        await until(lambda: client.target(a).state == why)
        outcome = await client.ask()
        assert (outcome.status, outcome.headers["retry-after"]) == (503, "2")


@in_loop
async def test_models_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "MODELS_S", 0.0)
    a = Backend("a")
    async with before(a) as client:
        assert (await client.ask(model="large")).status == 404
        a.models = ("tiny", "large")
        await until(lambda: "large" in client.target(a).models)
        assert (await client.ask(model="large")).words == a.words
        assert client.target(a).starts == 1
