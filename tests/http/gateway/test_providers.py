"""Names that stand for several models, and providers behind a gateway: what they are sent, when, and what it costs."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from engine.contracts.router import ModelRequest, ModelView
from engine.counters.gateway import COST, REQUESTS
from engine.http.gateway.passing import retry_after_s
from engine.service.targets import MOST_FAILURES
from engine.testing.context import build_context
from engine_plugins.router.tiered import TieredConfig, TieredRouter

from ...service.fakes import MemoryExporter, in_loop
from .fakes import (
    CHAT,
    JSON,
    MESSAGES,
    MODEL,
    SSE,
    Backend,
    Exchange,
    Fault,
    before,
    chunk,
    event,
    hang,
    healthy,
    until,
    with_providers,
)

THEIRS = {"models": {MODEL: "their/tiny"}}
USAGE = {"prompt_tokens": 100, "completion_tokens": 50}


def refusing(status: int, *lines: str) -> Fault:
    async def fault(exchange: Exchange) -> None:
        await exchange.refuse(status, "some_code", *lines)

    return fault


async def with_usage(exchange: Exchange) -> None:
    """As providers answer that were asked for usage."""
    if not exchange.asked.streams:
        await exchange.reply(200, json.dumps(json.loads(exchange.whole) | {"usage": USAGE}).encode())
        return
    *pieces, end = exchange.stream
    end = end.replace(event({"choices": [], "usage": {"completion_tokens": 6}}), event({"choices": [], "usage": USAGE}))
    await exchange.begin()
    await exchange.pieces(*pieces, end)
    await exchange.end()


def sent(backend: Backend) -> dict[str, Any]:
    """The last body that it got."""
    found: dict[str, Any] = json.loads(backend.asked[-1].body)
    return found


# names that stand for several models


@in_loop
async def test_a_name_goes_to_its_first_model_under_that_models_name() -> None:
    small, large = Backend("s", models=("small",)), Backend("l", models=("large",))
    async with before(small, large, models={"auto": ["small", "large"]}) as client:
        outcome = await client.ask(model="auto", seed=1)
        assert (outcome.words, outcome.headers["x-model"]) == (small.words, "small")
        assert (sent(small)["model"], sent(small)["seed"], large.asked) == ("small", 1, [])
        assert "x-model" not in (await client.ask(model="large")).headers
        listed = await client.json("/v1/models")
        assert [model["id"] for model in listed["data"]] == ["small", "large", "auto"]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@in_loop
async def test_a_model_that_fails_twice_gives_way_to_the_next(stream: bool) -> None:
    small, large = Backend("s", [refusing(500)] * 2, models=("small",)), Backend("l", models=("large",))
    async with before(small, large, models={"small": ["small", "large"]}) as client:
        outcome = await client.ask(stream=stream, model="small")
        assert (outcome.words, outcome.headers["x-attempt"], outcome.headers["x-model"]) == (large.words, "3", "large")
        assert [len(one.asked) for one in (small, large)] == [2, 1]


@in_loop
async def test_a_model_that_is_slow_to_fail_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.http.gateway.passing.QUICK_S", 0.05)

    async def slow(exchange: Exchange) -> None:
        await asyncio.sleep(0.1)
        await exchange.refuse(504, "some_code")

    small, large = Backend("s", [slow], models=("small",)), Backend("l", models=("large",))
    async with before(small, large, models={"small": ["small", "large"]}) as client:
        assert (await client.ask(model="small")).words == large.words and len(small.asked) == 1


@in_loop
async def test_a_client_that_leaves_while_a_second_try_is_waited_for_is_not_asked_for_again() -> None:
    exporter, small = MemoryExporter(), Backend("s", then=refusing(429, "Retry-After: 1"), models=("small",))
    large = Backend("l", models=("large",))
    async with before(small, large, models={"small": ["small", "large"]}, exporters=[exporter]) as client:
        asking = asyncio.create_task(client.ask(model="small"))
        await until(lambda: len(small.asked) == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: len(exporter.events) == 1)
        assert exporter.events[0].status == 499 and not large.asked and len(small.asked) == 1


@in_loop
async def test_a_model_that_fails_once_answers_itself() -> None:
    small, large = Backend("s", [refusing(500)], models=("small",)), Backend("l", models=("large",))
    async with before(small, large, models={"small": ["small", "large"]}) as client:
        outcome = await client.ask(model="small")
        assert (outcome.words, outcome.headers["x-attempt"], large.asked) == (small.words, "2", [])


@in_loop
async def test_a_short_rest_is_waited_for_and_a_long_one_is_not() -> None:
    for seconds, patience_s, expected in (("1", 2.0, "s"), ("1", 0.5, "l"), ("30", 2.0, "l")):
        small = Backend("s", [refusing(429, f"Retry-After: {seconds}")], models=("small",))
        large = Backend("l", models=("large",))
        async with before(small, large, models={"small": ["small", "large"]}, patience_s=patience_s) as client:
            begun_s = asyncio.get_running_loop().time()
            outcome = await client.ask(model="small")
            waited_s = asyncio.get_running_loop().time() - begun_s
            assert outcome.words[0].startswith(expected)
            assert waited_s >= 1.0 if expected == "s" else len(small.asked) == 1


@in_loop
async def test_a_model_whose_targets_are_down_gives_way_at_once() -> None:
    small, large = Backend("s", models=("small",), ready_status=503), Backend("l", models=("large",))
    async with before(small, large, models={"auto": ["small", "large"]}, waits=False) as client:
        await until(lambda: client.target(large).takes_requests)
        client.target(small).models = {"small": {}}
        assert (await client.ask(model="auto")).words == large.words
        assert (await client.json("/ready"))["status"] == "ready", "every name can answer"
        assert (await client.ask(model="small")).status == 503, "asked for by itself, it cannot"


@in_loop
async def test_a_name_that_stands_for_nothing_is_told_so_and_names_do_not_stand_for_names() -> None:
    a = Backend("a", models=("small",))
    names = {"auto": ["typo"], "other": ["auto"], "circle": ["circle"], "short": ["small"], "x:latest": ["small"]}
    async with before(a, models=names) as client:
        for name in ("auto", "other", "circle"):
            outcome = await client.ask(model=name)
            assert outcome.status == 404 and f"No target has a model that '{name}' stands for".encode() in outcome.body
        for name in ("short:latest", "x:latest", "short"):
            assert (await client.ask(model=name)).words == a.words
        for name in ("x", "small:latest:latest", "SMALL", "small ", "é" * 500, "\x00", ""):
            assert (await client.ask(model=name)).status == 404


@in_loop
async def test_a_name_for_models_that_nobody_has_says_which_they_are() -> None:
    async with before(Backend("s", models=("small",)), models={"auto": ["smal", "tiny"]}, waits=False) as client:
        await until(lambda: "small" in client.gateway.state.targets.models)
        status, found = await client.post(CHAT, json.dumps({"model": "auto", "messages": []}).encode())
        assert (status, found["error"]["code"]) == (404, "model_not_found")
        assert "'auto' stands for: 'smal', 'tiny'; there are: 'small'." in found["error"]["message"]
        status, _, page = await client.request("GET", "/ready")
        assert status == 503 and b"auto (smal, tiny)" in page


class Choosing(TieredRouter):
    """Chooses as a test says."""

    answer: Any = ("large",)
    asked: list[tuple[ModelRequest, tuple[ModelView, ...]]]

    def choose(self, request: ModelRequest, models: tuple[ModelView, ...]) -> Any:
        self.asked = [*getattr(self, "asked", []), (request, models)]
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def choosing() -> Choosing:
    return Choosing(TieredConfig(), build_context())


@in_loop
async def test_a_router_orders_the_models_and_sees_the_request() -> None:
    small, large = Backend("s", models=("small",)), Backend("l", models=("large",))
    router = choosing()
    names = {"auto": ["small", "large"]}
    async with before(small, large, models=names, make_router=lambda: router) as client:
        assert (await client.ask(model="auto", user="u")).words == large.words
        assert (await client.ask(model="small")).words == small.words
        ((request, models),) = router.asked
        assert (request.kind, request.model, request.fields["user"]) == ("chat", "auto", "u")
        assert json.loads(request.prompt["messages"]) == [{"role": "user", "content": "hi"}]
        assert models == (ModelView("small", True), ModelView("large", True))


@pytest.mark.parametrize("answer", [(), ("x",), ("large", "large"), "large", None, ValueError("no")], ids=str)
@in_loop
async def test_a_router_that_chooses_wrongly_fails_its_request_alone(answer: Any) -> None:
    small, large = Backend("s", models=("small",)), Backend("l", models=("large",))
    router = choosing()
    router.answer = answer
    async with before(small, large, models={"auto": ["small", "large"]}, make_router=lambda: router) as client:
        outcome = await client.ask(model="auto")
        assert outcome.status == 500 and b"router_failed" in outcome.body
        assert (await client.ask(model="small")).words == small.words


@in_loop
async def test_simple_questions_go_to_the_small_model_and_the_others_to_the_large_one() -> None:
    small, large = Backend("s", models=("small",)), Backend("l", models=("large",))

    def tiered() -> TieredRouter:
        return TieredRouter(TieredConfig(), build_context())

    names = {"auto": ["small", "large"], "large": ["large", "small"]}
    async with before(small, large, models=names, make_router=tiered) as client:
        outcome = await client.ask(model="auto")
        assert (outcome.words, outcome.headers["x-model-reason"]) == (small.words, "short and simple")
        outcome = await client.ask(model="auto", tools=[{"type": "function"}])
        assert (outcome.words, outcome.headers["x-model-reason"]) == (large.words, "not simple")
        long = [{"role": "user", "content": "word " * 2000}]
        assert (await client.ask(model="auto", messages=long)).words == large.words
        going_on = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "word " * 2000}]
        assert (await client.ask(model="auto", messages=[*going_on, *long])).words == small.words
        for fields in ({}, {"tools": [{"type": "function"}]}, {"messages": long}):
            assert (await client.ask(model="large", **fields)).words == large.words, "a model that is named is asked"


# providers


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@in_loop
async def test_a_provider_gets_its_names_its_key_and_no_field_of_ours(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_KEY", "sesame")
    monkeypatch.setenv("OUR_KEY", "ours")
    p = Backend("p", then=with_usage)
    settings = THEIRS | {"key_env": "THEIR_KEY"}
    async with with_providers(of={"p": (p, settings)}, key_env="OUR_KEY", server={"api_key": "k"}) as client:
        lines = ("Authorization: Bearer k", "Cookie: a=b")
        outcome = await client.ask(CHAT, stream, *lines, priority=1, cache_salt="tenant", temperature=0.5)
        assert (outcome.words, outcome.headers["x-target"]) == (p.words, "p")
        assert p.asked[0].headers["authorization"] == "Bearer sesame" and "cookie" not in p.asked[0].headers
        body = sent(p)
        assert (body["model"], body["temperature"]) == ("their/tiny", 0.5)
        assert not {"priority", "cache_salt"} & {*body}
        assert not p.probed, "probes may cost something"


@in_loop
async def test_a_provider_takes_over_only_when_no_own_target_answers() -> None:
    a, p = Backend("a"), Backend("p")
    async with with_providers(a, of={"p": (p, THEIRS)}) as client:
        assert (await client.ask()).words == a.words
        await a.stop()
        outcome = await client.ask()
        assert (outcome.words, outcome.headers["x-target"]) == (p.words, "p")
        assert sent(p)["model"] == "their/tiny" and "x-model" not in outcome.headers


@in_loop
async def test_a_provider_takes_what_would_wait_too_long() -> None:
    a, p = Backend("a"), Backend("p")
    async with with_providers(a, of={"p": (p, THEIRS | {"overflow_ms": 500.0})}) as client:
        assert (await client.ask()).words == a.words
        for tokens in range(100):
            client.target(a).first_byte.add(tokens, 1e3 + tokens)
        outcome = await client.ask()
        assert outcome.words == p.words and "ms expected at" in outcome.headers["x-route-reason"]
        assert "x-expected-ms" not in outcome.headers, "p has answered nothing yet"
        for tokens in range(100):
            client.gateway.state.targets["p"].first_byte.add(tokens, 250.0)
        assert 240 < int((await client.ask()).headers["x-expected-ms"]) < 260


@pytest.mark.parametrize("wants", [True, False])
@in_loop
async def test_usage_is_paid_for_and_shown_to_those_who_want_it(wants: bool) -> None:
    exporter, p = MemoryExporter(), Backend("p", then=with_usage)
    settings = THEIRS | {"input_price": 1.0, "output_price": 4.0}
    async with with_providers(of={"p": (p, settings)}, exporters=[exporter]) as client:
        asks = {"stream_options": {"include_usage": True}} if wants else {}
        outcome = await client.ask(**asks)
        assert outcome.words == p.words and (b'"usage"' in outcome.body) == wants
        assert sent(p)["stream_options"] == {"include_usage": True}
        assert b'"usage"' in (await client.ask(stream=False)).body and "stream_options" not in sent(p)
        cost = (100 * 1.0 + 50 * 4.0) / 1e6
        assert await client.counted(COST) == {"p": {"": pytest.approx(2 * cost)}}
        assert [one.cost for one in exporter.events] == [pytest.approx(cost)] * 2


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("how", ["ends", "cut"])
@in_loop
async def test_an_end_without_a_blank_line_is_passed_on_and_paid_for(end: bytes, how: str) -> None:
    async def unended(exchange: Exchange) -> None:
        usage = event({"choices": [], "usage": USAGE})
        await exchange.begin()
        await exchange.pieces(*exchange.stream[:-1], chunk({}, "stop"), usage + b"data: [DONE]" + end)
        await exchange.end() if how == "ends" else exchange.cut()

    async def usage_last(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.pieces(*exchange.stream[:-1], chunk({}, "stop"), event({"choices": [], "usage": USAGE})[:-2])
        await exchange.end()

    exporter, p = MemoryExporter(), Backend("p", [unended, usage_last])
    async with with_providers(of={"p": (p, THEIRS | {"input_price": 1.0})}, exporters=[exporter]) as client:
        outcome = await client.ask()
        assert outcome.words == p.words and outcome.body.endswith(b"data: [DONE]" + end)
        assert (await client.ask()).words == p.words
        assert await client.counted(COST) == {"p": {"": pytest.approx(2 * 100 / 1e6)}}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@in_loop
async def test_usage_that_nobody_can_have_used_harms_neither_the_answer_nor_the_cost(stream: bool) -> None:
    async def lies(exchange: Exchange) -> None:
        usage = b'{"prompt_tokens": 1%s, "completion_tokens": -7}' % (b"0" * 400)
        if not exchange.asked.streams:
            await exchange.reply(200, exchange.whole[:-1] + b', "usage": ' + usage + b"}")
            return
        await exchange.begin()
        done = b'data: {"choices": [], "usage": ' + usage + b"}\n\ndata: [DONE]\n\n"
        await exchange.pieces(*exchange.stream[:-1], chunk({}, "stop") + done)
        await exchange.end()

    p = Backend("p", then=lies)
    async with with_providers(of={"p": (p, THEIRS | {"input_price": 1.0, "output_price": 1.0})}) as client:
        outcome = await client.ask(stream=stream)
        assert (outcome.kind, outcome.words, b'"usage"' in outcome.body) == ("answer", p.words, not stream)
        assert await client.counted(COST) == {"p": {}}


@pytest.mark.parametrize("status", [401, 402, 403])
@in_loop
async def test_a_provider_that_refuses_the_key_is_left_for_another_and_named_where_there_is_none(status: int) -> None:
    p, q = Backend("p", then=refusing(status)), Backend("q")
    async with with_providers(of={"p": (p, THEIRS), "q": (q, THEIRS)}) as client:
        assert (await client.ask()).words == q.words
    async with with_providers(of={"p": (p, THEIRS)}) as client:
        outcome = await client.ask()
        assert outcome.status == 502 and b"gateway.providers.p.key_env" in outcome.body


@in_loop
async def test_a_refused_key_is_named_by_its_variable_in_the_log_and_the_fleet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("THEIR_KEY", "sesame")
    p = Backend("p", [refusing(401)] * MOST_FAILURES)
    async with with_providers(of={"p": (p, THEIRS | {"key_env": "THEIR_KEY"})}) as client:
        expected = "refused the key in $THEIR_KEY with 401 (gateway.providers.p.key_env)"
        for count in range(MOST_FAILURES):
            assert b"THEIR_KEY" not in (await client.ask()).body, "it is no business of clients"
            (shown,) = (await client.json("/engine/fleet"))["engines"]
            assert shown["refusal"] == expected and "sesame" not in str(shown)
            assert shown["why_not"] == (expected if count == MOST_FAILURES - 1 else None)
        logged = capsys.readouterr().out
        assert expected in logged and "sesame" not in logged
        client.gateway.state.targets["p"].breaker.worked()
        assert (await client.ask()).words == p.words
        assert (await client.json("/engine/fleet"))["engines"][0]["refusal"] == ""


@in_loop
async def test_a_provider_that_cannot_be_reached_is_tried_again_by_the_next_request() -> None:
    p = Backend("p")
    async with with_providers(of={"p": (p, THEIRS)}) as client:
        await p.stop()
        assert (await client.ask()).status == 502
        await p.start()
        assert (await client.ask()).words == p.words


@in_loop
async def test_a_provider_that_does_not_know_its_model_is_left_for_another() -> None:
    p, q = Backend("p", then=refusing(404)), Backend("q")
    async with with_providers(of={"p": (p, THEIRS), "q": (q, THEIRS)}) as client:
        assert (await client.ask()).words == q.words


@in_loop
async def test_a_body_that_is_too_large_for_one_provider_is_tried_at_the_next() -> None:
    p, q = Backend("p", then=refusing(413)), Backend("q", [healthy, refusing(413)])
    async with with_providers(of={"p": (p, THEIRS), "q": (q, THEIRS)}) as client:
        assert (await client.ask()).words == q.words
        assert (await client.ask()).status == 413
        assert client.gateway.state.targets["p"].breaker.failures == 0, "it is the request's fault"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("indent", [None, 2])
@in_loop
async def test_a_200_with_an_error_is_left_for_another(stream: bool, indent: int | None) -> None:
    async def fails(exchange: Exchange) -> None:
        error = json.dumps({"error": {"message": "no", "code": 502}}, indent=indent)
        if exchange.asked.streams:
            await exchange.reply(200, f"data: {' '.join(error.split())}\n\n".encode(), SSE)
        else:
            await exchange.reply(200, error.encode())

    p, q = Backend("p", then=fails), Backend("q")
    async with with_providers(of={"p": (p, THEIRS), "q": (q, THEIRS)}) as client:
        assert (await client.ask(stream=stream)).words == q.words
    async with with_providers(of={"p": (p, THEIRS)}) as client:
        outcome = await client.ask(stream=stream)
        assert (outcome.kind, outcome.status) == ("error", 200 if stream else 502)
        assert await client.counted(REQUESTS) == {"p": {"502": 1}}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@in_loop
async def test_an_error_that_is_null_is_none(stream: bool) -> None:
    async def says_null(exchange: Exchange) -> None:
        if not exchange.asked.streams:
            return await exchange.reply(200, b'{"error":null,' + exchange.whole[1:])
        await exchange.begin()
        await exchange.pieces(*[piece.replace(b"data: {", b'data: {"error":null,') for piece in exchange.stream[:2]])
        await exchange.end()  # too soon

    p, q = Backend("p", then=says_null), Backend("q")
    async with with_providers(of={"p": (p, THEIRS), "q": (q, THEIRS)}) as client:
        await client.ask(stream=stream)
        assert not q.asked
        assert (await client.counted(REQUESTS))["p"] == {"502" if stream else "200": 1}


@pytest.mark.parametrize("status", [101, 204, 206, 302, 304, 600, 999])
@in_loop
async def test_a_status_that_is_neither_an_answer_nor_an_error_is_left_for_another(status: int) -> None:
    async def odd(exchange: Exchange) -> None:
        await exchange.head(status, "Location: /engine/fleet/drain?engine=q", "Content-Length: 0")

    p, q = Backend("p", then=odd), Backend("q")
    async with with_providers(of={"p": (p, THEIRS), "q": (q, THEIRS)}) as client:
        outcome = await client.ask()
        assert (outcome.words, len(p.asked), client.gateway.state.targets["q"].draining) == (q.words, 1, False)


@in_loop
async def test_a_coded_answer_that_nobody_asked_for_is_none() -> None:
    async def coded(exchange: Exchange) -> None:
        await exchange.reply(200, gzip.compress(exchange.whole), JSON, "Content-Encoding: gzip")

    p, q = Backend("p", then=coded), Backend("q")
    async with with_providers(of={"p": (p, THEIRS), "q": (q, THEIRS)}) as client:
        assert (await client.ask(CHAT, False, "Accept-Encoding: gzip")).words == q.words


@in_loop
async def test_a_provider_that_refuses_stream_options_is_sent_none() -> None:
    p = Backend("p")
    async with with_providers(of={"p": (p, THEIRS | {"drop": ["stream_options"]})}) as client:
        assert (await client.ask(stream_options={"include_usage": True})).words == p.words
        assert "stream_options" not in sent(p)


@pytest.mark.parametrize("status", [429, 503])
@in_loop
async def test_a_provider_that_asks_for_a_rest_has_it(status: int) -> None:
    p = Backend("p", [refusing(status, "Retry-After: 7")])
    async with with_providers(of={"p": (p, THEIRS)}) as client:
        assert (await client.ask()).status == status
        outcome = await client.ask()
        assert (outcome.status, outcome.headers["retry-after"], len(p.asked)) == (429, "7", 1)
        (shown,) = (await client.json("/engine/fleet"))["engines"]
        assert (shown["ready"], shown["state"]) == (False, "asked for 7 s without requests")
        target = client.gateway.state.targets["p"]
        target.rests_until_s = 0.0
        assert (await client.ask()).words == p.words


@in_loop
async def test_a_provider_whose_rest_is_short_is_waited_for_before_another_model() -> None:
    p, q = Backend("p", [refusing(429, "Retry-After: 1")]), Backend("q")
    of = {"p": (p, {"models": {"large": "a"}}), "q": (q, {"models": {"small": "b"}})}
    async with with_providers(of=of, models={"large": ["large", "small"]}) as client:
        begun_s = asyncio.get_running_loop().time()
        outcome = await client.ask(model="large")
        assert outcome.words == p.words and asyncio.get_running_loop().time() - begun_s >= 1.0
        assert not q.asked and [sent(p)["model"], len(p.asked)] == ["a", 2]


@in_loop
async def test_an_own_target_that_refuses_one_client_serves_the_others() -> None:
    a = Backend("a", [refusing(429, "Retry-After: 7")])
    async with before(a) as client:
        assert (await client.ask()).status == 429
        assert (await client.ask()).words == a.words


@in_loop
async def test_a_provider_has_time_limits_of_its_own() -> None:
    p, q = Backend("p", then=hang), Backend("q")
    async with with_providers(of={"p": (p, THEIRS | {"first_byte_s": 0.2}), "q": (q, THEIRS)}) as client:
        outcome = await client.ask()
        assert (outcome.words, outcome.headers["x-attempt"]) == (q.words, "2")


@in_loop
async def test_a_request_takes_no_longer_than_one_may() -> None:
    async def slow(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.pieces(*exchange.stream[:2])
        while True:
            await exchange.pieces(exchange.stream[1])
            await asyncio.sleep(0.02)

    for given in ({"of": {"p": (Backend("p", then=slow), THEIRS)}}, {"of": {}}):
        own = [] if given["of"] else [Backend("a", then=slow)]
        async with with_providers(*own, **given, total_s=0.5) as client:
            outcome = await client.ask()
            assert outcome.kind == "error" and b"gateway.total_s" in outcome.body


@in_loop
async def test_endpoints_that_a_provider_does_not_have_are_not_asked_of_it() -> None:
    async with with_providers(of={"p": (Backend("p"), THEIRS)}) as client:
        outcome = await client.ask(MESSAGES)
        assert outcome.status == 404 and b"no such endpoint" in outcome.body
    async with with_providers(Backend("a", models=(MODEL,)), of={"p": (Backend("p"), THEIRS)}) as client:
        assert (await client.ask(MESSAGES)).words == ["a0", "a1", "a2", "a3", "a4", "a5"]


@in_loop
async def test_a_request_cannot_name_a_url() -> None:
    a, p = Backend("a"), Backend("p")
    async with with_providers(a, of={"p": (p, THEIRS)}) as client:
        evil = {"base_url": p.url, "url": p.url, "api_base": p.url, "provider": "p", "targets": [p.url]}
        outcome = await client.ask(CHAT, True, f"X-Target: {p.id}", f"X-Forwarded-Host: {p.id}", **evil)
        assert outcome.words == a.words and not p.asked


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7", 7.0), ("0", 0.0), ("", None), ("Wed, 21 Oct 2015 07:28:00 GMT", None), ("-1", None), ("²", None)],
)
def test_retry_after_is_read_where_it_is_a_number(text: str, seconds: float | None) -> None:
    assert retry_after_s({"Retry-After": text} if text else {}) == seconds
