"""A smaller model answers where the beginning of its answer shows confidence, and the next larger one where not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from engine.assembly.errors import AssemblyError
from engine.contracts.config import CascadeSettings, GatewaySettings
from engine.counters.gateway import COST, LOOKS
from engine.http.gateway.cascade import logprobs_of
from engine.http.gateway.tiers import Tiers
from engine.service.targets import MOST_FAILURES

from ...service.fakes import in_loop
from ...service.test_keys import entry, written
from .fakes import (
    CHAT,
    MESSAGES,
    Asked,
    Backend,
    Exchange,
    Fault,
    before,
    hang,
    healthy_whole,
    until,
    with_providers,
)

NAMES = {"auto": ["small", "large"]}
TABLE = {
    "model": "small", "reference": "large", "prompts": 100, "tokens": 8, "quantile": 0.25,
    "agreement": [[-3.0, 0.2], [-1.0, 0.8], [-0.5, 0.95]],
}  # fmt: skip


def table(folder: Path, **changed: Any) -> str:
    (folder / "table.json").write_text(json.dumps(TABLE | changed))
    return str(folder / "table.json")


def cascade(folder: Path, **given: Any) -> dict[str, Any]:
    """Settings of a gateway."""
    return {"models": NAMES, "cascade": {"auto": CascadeSettings(table(folder), **given)}}


def is_look(asked: Asked) -> bool:
    return asked.headers["x-request-id"].endswith("-look")


def saying(*logprobs: float) -> Fault:
    """A server whose tokens have these log probabilities, where they are asked for."""

    async def fault(exchange: Exchange) -> None:
        body = json.loads(exchange.asked.body)
        if not body.get("logprobs"):
            await exchange.answer()
            return
        content = [{"token": "a", "logprob": one, "top_logprobs": []} for one in logprobs]
        answer = {"choices": [{"message": {"content": "a"}, "logprobs": {"content": content}}]}
        answer["usage"] = {"prompt_tokens": 100, "completion_tokens": len(logprobs)}  # type: ignore[assignment]
        await exchange.reply(200, json.dumps(answer).encode())

    return fault


SURE, UNSURE = saying(-0.1, -0.4, -0.2, -9.0, -0.3), saying(-0.1, -0.6, -0.7, -9.0, -0.3)
"""The quantile is the second lowest: one unlikely token decides nothing."""


@in_loop
async def test_a_confident_model_answers_and_an_unsure_one_gives_way(tmp_path: Path) -> None:
    small, large = Backend("s", then=SURE, models=("small",)), Backend("l", models=("large",))
    async with before(small, large, **cascade(tmp_path)) as client:
        outcome = await client.ask(stream=False, model="auto", max_tokens=100, temperature=0.7)
        assert (outcome.words, outcome.headers["x-model"]) == (small.words, "small") and not large.asked
        assert outcome.headers["x-model-reason"] == "confidence -0.40, at least -0.50"
        look, whole = (json.loads(one.body) for one in small.asked)
        assert (look["max_tokens"], look["temperature"], look["logprobs"], look["stream"]) == (8, 0, True, False)
        assert (whole["max_tokens"], whole["temperature"], "logprobs" in whole) == (100, 0.7, False)
        assert look["messages"] == whole["messages"] and look["model"] == "small"
        small.then = UNSURE
        outcome = await client.ask(stream=False, model="auto")
        assert (outcome.words, outcome.headers["x-model"]) == (large.words, "large")
        assert outcome.headers["x-model-reason"] == "small: confidence -0.70, below -0.50"
        assert (await client.counted(LOOKS))["auto"] == {"confident": 1, "unsure": 1}
        (shown,) = (await client.json("/engine/names"))["names"].values()
        assert shown["cascade"] | {"confident": 1, "unsure": 1} == shown["cascade"]
        assert (shown["models"], shown["cascade"]["threshold"]) == (["small", "large"], -0.5)


@in_loop
async def test_lower_wishes_have_lower_thresholds(tmp_path: Path) -> None:
    small, large = Backend("s", then=UNSURE, models=("small",)), Backend("l", models=("large",))
    async with before(small, large, **cascade(tmp_path, agreement=0.7)) as client:
        assert (await client.ask(stream=False, model="auto")).words == small.words


@in_loop
async def test_streams_are_looked_at_only_where_that_is_asked_for(tmp_path: Path) -> None:
    small, large = Backend("s", then=UNSURE, models=("small",)), Backend("l", models=("large",))
    async with before(small, large, **cascade(tmp_path)) as client:
        assert (await client.ask(model="auto")).words == small.words and not is_look(small.asked[0])
    small.asked.clear()
    async with before(small, large, **cascade(tmp_path, streams=True)) as client:
        assert (await client.ask(model="auto")).words == large.words and [*map(is_look, small.asked)] == [True]


@pytest.mark.parametrize(
    ("path", "fields"), [(CHAT, {"model": "small"}), (CHAT, {"n": 2}), (MESSAGES, {}), (CHAT, {"model": "large"})]
)
@in_loop
async def test_nothing_else_is_looked_at(path: str, fields: dict[str, Any], tmp_path: Path) -> None:
    small, large = Backend("s", then=UNSURE, models=("small",)), Backend("l", models=("large",))
    async with before(small, large, **cascade(tmp_path)) as client:
        assert (await client.ask(path, False, **({"model": "auto"} | fields))).kind == "answer"
        assert not any(map(is_look, small.asked + large.asked))


async def refuses(exchange: Exchange) -> None:
    await exchange.refuse(500, "some_code")


async def nonsense(exchange: Exchange) -> None:
    await exchange.reply(200, b'{"choices": [{"logprobs": {"content": "no"}}]}')


@pytest.mark.parametrize(
    ("fault", "result", "reason"),
    [
        (healthy_whole, "no_logprobs", "small: no log probabilities"),
        (saying(), "unsure", "small: an answer without tokens"),
        (nonsense, "no_logprobs", "small: no log probabilities"),
        (refuses, "failed", "small: status 500"),
        (hang, "failed", "small: no answer within 0.2 s"),
    ],
    ids=["none", "empty", "nonsense", "500", "hangs"],
)
@in_loop
async def test_a_look_that_shows_nothing_is_told_and_the_larger_model_answers(
    fault: Fault, result: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, large = Backend("s", then=fault, models=("small",)), Backend("l", models=("large",))
    async with before(small, large, **cascade(tmp_path, limit_s=0.2)) as client:
        outcome = await client.ask(stream=False, model="auto")
        assert (outcome.words, outcome.headers["x-model-reason"]) == (large.words, reason)
        assert (await client.counted(LOOKS))["auto"] == {result: 1}
        assert ("gives no log probabilities" in capsys.readouterr().out) == (result == "no_logprobs")


@in_loop
async def test_requests_that_are_refused_say_nothing_of_the_target(tmp_path: Path) -> None:
    async def invalid(exchange: Exchange) -> None:
        await exchange.refuse(400, "invalid_value")

    small, large = Backend("s", then=invalid, models=("small",)), Backend("l", then=invalid, models=("large",))
    async with before(small, large, **cascade(tmp_path)) as client:
        for _ in range(MOST_FAILURES):
            assert (await client.ask(stream=False, model="auto")).status == 400
        assert client.target(small).takes_requests
        small.then = refuses
        for _ in range(MOST_FAILURES):
            assert (await client.ask(stream=False, model="auto")).status == 400
        assert not client.target(small).takes_requests and len(small.asked) == 2 * MOST_FAILURES


@in_loop
async def test_a_look_is_taken_on_the_terms_of_its_client(tmp_path: Path) -> None:
    small, large = Backend("s", then=SURE, models=("small",)), Backend("l", models=("large",))
    path = written(tmp_path, [entry("night", "k", priority=7, slo=["batch"])])
    async with before(small, large, server={"keys": path}, **cascade(tmp_path)) as client:
        answer = await client.ask(CHAT, False, "Authorization: Bearer k", model="auto")
        assert answer.words == small.words and is_look(small.asked[0])
        terms = [(one.headers.get("x-slo-class"), json.loads(one.body)) for one in small.asked]
        assert [(name, body["priority"]) for name, body in terms] == [("batch", 7)] * 2
        assert terms[0][1]["cache_salt"] == terms[1][1]["cache_salt"] != ""


@in_loop
async def test_where_the_larger_model_fails_the_smaller_one_answers(tmp_path: Path) -> None:
    small, large = Backend("s", then=UNSURE, models=("small",)), Backend("l", [refuses] * 2, models=("large",))
    async with before(small, large, **cascade(tmp_path)) as client:
        outcome = await client.ask(stream=False, model="auto")
        assert (outcome.words, outcome.headers["x-model-reason"]) == (small.words, "large did not answer")


@in_loop
async def test_a_client_that_leaves_ends_the_look(tmp_path: Path) -> None:
    small, large = Backend("s", then=hang, models=("small",)), Backend("l", models=("large",))
    async with before(small, large, **cascade(tmp_path)) as client:
        asking = asyncio.create_task(client.ask(stream=False, model="auto"))
        await until(lambda: len(small.asked) == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await small.left.wait()
        assert not large.asked


@in_loop
async def test_a_look_at_a_provider_is_paid_for(tmp_path: Path) -> None:
    p, large = Backend("p", then=UNSURE), Backend("l", models=("large",))
    of = {"p": (p, {"models": {"small": "their/small"}, "output_price": 1e6})}
    async with with_providers(large, of=of, **cascade(tmp_path)) as client:
        assert (await client.ask(stream=False, model="auto")).words == large.words
        assert json.loads(p.asked[0].body)["model"] == "their/small"
        assert (await client.counted(COST))["p"] == {"": 5.0}


@pytest.mark.parametrize(
    ("changed", "given", "said"),
    [
        ({"model": "large"}, {}, "is of large and large, expected models of auto"),
        ({"reference": "huge"}, {}, "is of small and huge, expected models of auto"),
        ({"agreement": [[-1.0, 0.9], [-0.5, 0.8]]}, {}, "shares that ascend"),
        ({"agreement": []}, {}, "shares that ascend"),
        ({"tokens": "many"}, {}, "is no table of engine calibrate"),
        ({}, {"agreement": 0.99}, "gateway.cascade.auto.agreement=0.99: "),
        ({}, {"table": "/nowhere"}, "gateway.cascade.auto.table=/nowhere: No such file"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(
    changed: dict[str, Any], given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    settings = CascadeSettings(**({"table": table(tmp_path, **changed)} | given))
    with pytest.raises(AssemblyError) as refused:
        Tiers.of(GatewaySettings(models=NAMES, cascade={"auto": settings}))
    assert said in str(refused.value)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"choices": []}', b'{"choices": [{"logprobs": null}]}', b"\xff"])
def test_answers_may_be_anything(data: bytes) -> None:
    assert logprobs_of(data) is None
