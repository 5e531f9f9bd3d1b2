"""What a gateway says of itself and its targets: ``engine.http.gateway.routes``, ``.state``, ``.app``."""

from __future__ import annotations

import json

from engine.contracts.router import Router
from engine.http.gateway.app import build_gateway
from engine.http.gateway.state import gateway_of
from engine.testing.context import build_context
from engine_plugins.exporter.config import PrometheusConfig
from engine_plugins.exporter.prometheus import PrometheusExporter

from ...service.fakes import in_loop
from .fakes import CHAT, Backend, Client, before, first_ready, until

NAMES = (build_gateway, gateway_of)


async def code_of(client: Client, path: str, *lines: str) -> tuple[int, str]:
    """Status and error code of a POST."""
    status, found = await client.post(path, None, *lines)
    return status, found["error"]["code"]


@in_loop
async def test_models_of_all_targets_are_listed_once() -> None:
    async with before(Backend("a", models=("x", "y")), Backend("b", models=("y", "z"))) as client:
        listed = await client.json("/v1/models")
        assert [model["id"] for model in listed["data"]] == ["x", "y", "z"]


@in_loop
async def test_each_model_has_a_router_of_its_own_and_the_targets_that_have_it() -> None:
    made: list[Router] = []

    def make_router() -> Router:
        made.append(first_ready())
        return made[-1]

    a, b, c = Backend("a", models=("x",)), Backend("b", models=("y",)), Backend("c", models=("x", "y"))
    async with before(a, b, c, make_router=make_router) as client:
        for model, server in (("x", a), ("y", b), ("x:latest", a), (None, a), ("x", a)):
            assert (await client.ask(model=model)).words == server.words, model
        assert len(made) == 3 and {*client.gateway.state.placing} == {"x", "y"}, "and one that chooses models"
        await a.stop()
        await until(lambda: not client.target(a).takes_requests)
        assert (await client.ask(model="x")).words == c.words, "b does not have it"


@in_loop
async def test_what_asks_for_engines_is_told_where_they_are() -> None:
    a = Backend("a")
    async with before(a) as client:
        for path in ("/engine/fleet/restart", "/engine/plan", "/engine/counters?engine=x"):
            status, found = await client.post(path)
            assert status == 404 and f"http://{a.id}" in found["error"]["message"], path


@in_loop
async def test_a_model_that_nobody_has_is_not_found_once_all_targets_are_known() -> None:
    a, b = Backend("a"), Backend("b", ready_status=503)
    async with before(a, b, waits=False) as client:
        await until(lambda: client.target(a).takes_requests)
        outcome = await client.ask(model="huge")
        assert outcome.status == 503 and b.id.encode() in outcome.body, "that one may have it"
        b.ready_status = 200
        await until(lambda: client.target(b).takes_requests)
        outcome = await client.ask(model="huge")
        error = json.loads(outcome.body)["error"]
        assert (outcome.status, error["code"]) == (404, "model_not_found")
        assert "'huge'" in error["message"] and "'tiny'" in error["message"]


@in_loop
async def test_an_error_names_some_of_many_models() -> None:
    async with before(Backend("a", models=tuple([f"m{i}" for i in range(1000)]))) as client:
        outcome = await client.ask(model="huge")
        assert outcome.status == 404 and b"'m0'" in outcome.body and len(outcome.body) < 1000


@in_loop
async def test_a_gateway_is_ready_while_every_model_has_a_target() -> None:
    a, b = Backend("a", models=("x",)), Backend("b", models=("y",))
    async with before(a, b) as client:
        assert (await client.json("/ready"))["status"] == "ready"
        client.target(b).draining = True
        status, _, body = await client.request("GET", "/ready")
        assert status == 503 and b"no target takes requests for y" in body
        assert (await client.json("/health"))["targets"] == 1
        outcome = await client.ask(model="y")
        assert outcome.status == 503


@in_loop
async def test_a_name_of_several_models_is_ready_with_one_and_a_model_alone_needs_its_own() -> None:
    a, b, c = (Backend(name, models=(name,)) for name in "abc")
    async with before(a, b, c, models={"auto": ["a", "b"], "b": ["b", "a"]}) as client:
        for lost, status in ([[a], 200], [[b], 200], [[c], 503], [[a, b], 503]):
            for server in (a, b, c):
                client.target(server).draining = server in lost
            assert (await client.request("GET", "/ready"))[0] == status, lost


@in_loop
async def test_a_gateway_that_drains_is_not_ready() -> None:
    async with before(Backend("a")) as client:
        client.gateway.state.admission.lame_duck = True
        status, _, body = await client.request("GET", "/ready")
        assert status == 503 and b"draining" in body
        assert (await client.ask()).kind == "answer", "it still takes requests"


@in_loop
async def test_the_fleet_says_of_each_target_how_it_is() -> None:
    a, b = Backend("a"), Backend("b", models=("tiny", "large"))
    async with before(a, b) as client:
        page = await client.json("/engine/fleet")
        assert page["change"] is None
        first, second = page["engines"]
        assert (first["id"], first["model"], first["state"], first["ready"]) == (a.id, "tiny", "ready", True)
        assert (first["why_not"], first["starts"], second["model"]) == (None, 1, "tiny, large")
        assert first["load"] == {"sequences": 0, "queued_tokens": 0, "running_tokens": 0}


@in_loop
async def test_the_last_target_of_a_model_is_drained_by_force_only() -> None:
    a, b = Backend("a"), Backend("b", models=("tiny", "large"))
    async with before(a, b) as client:
        assert await code_of(client, f"/engine/fleet/drain?engine={b.id}") == (409, "last_engine")
        assert (await client.post(f"/engine/fleet/drain?engine={b.id}&force=1"))[0] == 200
        assert (await client.ask(model="large")).status == 503
        assert await code_of(client, f"/engine/fleet/drain?engine={a.id}") == (409, "last_engine")
        status, state = await client.post(f"/engine/fleet/undrain?engine={b.id}")
        assert status == 200 and state["engines"][1]["ready"]
        assert (await client.ask(model="large")).words == b.words


@in_loop
async def test_wrong_changes_are_refused() -> None:
    async with before(Backend("a"), Backend("b")) as client:
        status, found = await client.post("/engine/fleet/drain")
        assert status == 400 and "there are: 127.0.0.1:" in found["error"]["message"]
        assert (await client.post("/engine/fleet/drain?engine=c"))[0] == 404
        assert await code_of(client, "/engine/fleet/drain?engine=c", "X-Forwarded-For: 203.0.113.9") == (
            403,
            "local_only",
        )


@in_loop
async def test_bodies_that_cannot_be_placed_are_refused_in_the_words_of_their_api() -> None:
    a = Backend("a")
    async with before(a) as client:
        for path in (CHAT, "/v1/messages", "/api/chat"):
            status, found = await client.post(path, b"[1]")
            assert status == 400
            assert isinstance(found["error"], str) if path == "/api/chat" else found["error"]["message"]
        assert not a.asked


@in_loop
async def test_a_scrape_has_the_gateways_counters_with_a_line_for_each_target() -> None:
    exporter = PrometheusExporter(PrometheusConfig(), build_context())
    a, b = Backend("a"), Backend("b")
    async with before(a, b, exporters=[exporter]) as client:
        await client.ask()
        status, _, page = await client.request("GET", "/metrics")
        text = page.decode()
        assert status == 200 and text.count("# TYPE engine_gateway_requests_total counter") == 1
        lines = [line for line in text.splitlines() if f'engine="{a.id}"' in line or f'engine="{b.id}"' in line]
        assert [line.endswith(" 1.0") for line in lines if "target_ready{" in line] == [True, True]
        (served,) = [line for line in lines if "requests_total{" in line and not line.endswith(" 0.0")]
        assert f'engine="{a.id}"' in served and 'status="200"' in served and served.endswith(" 1.0")


@in_loop
async def test_a_gateway_says_how_many_targets_there_are_and_what_waits_there() -> None:
    a, b = Backend("a"), Backend("b")
    async with before(a, b) as client:
        found = await client.json("/engine/scale")
        assert (found["desired"], found["ready"], found["saturation"], found["backlog_s"]) == (2, 2, 0, None)
        assert found["classes"]["default"]["shed"] == 0 and found["may_go"] == [a.id]
        client.target(b).drain()
        client.target(a).load.queued_tokens = 7
        for _ in range(9):
            client.target(a).first_byte.add(7, 50.0)
        found = await client.json("/engine/scale")
        assert (found["desired"], found["ready"], found["may_go"]) == (1, 1, [])
        assert (found["tokens_in_flight"]["queued"], round(found["backlog_s"], 6)) == (7, 0.05)
        client.target(a).load.queued_tokens = 0
