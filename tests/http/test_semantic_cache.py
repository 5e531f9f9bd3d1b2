"""Router ``semantic_cache`` behind the API: what a client gets again, and that it says so."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from engine.testing.context import build_context
from engine_plugins.embedder.ngrams import NgramsConfig, NgramsEmbedder
from engine_plugins.router.semantic_cache import SemanticCacheConfig, SemanticCacheRouter

from ..service.fakes import END, ids, in_loop
from .fakes import Running, chat, events_of, running

ASKED, OTHER, ELSE = "How do I open a file?", "please, how to open files", "How do I close a file?"


def router(**config: Any) -> SemanticCacheRouter:
    context = build_context()
    asking = replace(context, embedder=lambda: NgramsEmbedder(NgramsConfig(), context))
    return SemanticCacheRouter(SemanticCacheConfig(**{"audit": 0.0, **config}), asking)


def counts(request: Any) -> list[tuple[int, ...]]:
    """Says another text each time."""
    counts.calls += 1  # type: ignore[attr-defined]
    return [(token,) for token in (*ids(f"answer {counts.calls}"), END)]  # type: ignore[attr-defined]


counts.calls = 0  # type: ignore[attr-defined]


async def say(server: Running, text: str, **fields: Any) -> tuple[str, str]:
    """What is answered, and why it was stored."""
    _, _, data = await server.post("/v1/chat/completions", chat(text, **{"temperature": 0, **fields}))
    found = json.loads(data)
    return found["choices"][0]["message"]["content"], found["timings"].get("route", {}).get("reason", "")


@in_loop
async def test_a_similar_question_gets_the_stored_answer_whole_or_streamed_and_says_so() -> None:
    async with running(counts, router=router()) as server:
        first, why = await say(server, ASKED)
        assert why == "" and await say(server, ASKED) == (first, "stored answer to an equal request")
        again, why = await say(server, OTHER)
        assert again == first and why.startswith("stored answer to a similar question, cosine 0.")
        _, _, data = await server.post("/v1/chat/completions", chat(OTHER, temperature=0, stream=True))
        events = events_of(data)
        assert (
            "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]) == first
        )
        assert "similar question" in json.dumps(events[-1]["timings"]["route"])
        other, why = await say(server, ELSE)
        assert other != first and why == ""
        assert len(server.client.requests) == 2
        _, _, data = await server.get("/engine/counters")
    counted = {each["name"]: each["values"] for each in json.loads(data)["metrics"] if "values" in each}
    assert counted["engine_answer_cache_lookups_total"] == {"hit": 1, "similar": 2, "miss": 2}
    assert counted["engine_answer_cache_entries"] == {"": 2}


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "another tenant"},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": OTHER}]},
        {"messages": [*chat("Hi")["messages"], {"role": "assistant", "content": "Hi"}, *chat(OTHER)["messages"]]},
        {"temperature": 0.5, "seed": 1},
        {"max_tokens": 50},
        {"stop": ["x"]},
        {"n": 2},
        {"logprobs": True},
        {"logit_bias": {"5": 1}},
        {"presence_penalty": 0.5},
    ],
)
@in_loop
async def test_what_else_shapes_an_answer_must_be_equal(fields: dict[str, Any]) -> None:
    async with running(counts, router=router()) as server:
        first, _ = await say(server, ASKED)
        assert (await say(server, OTHER))[0] == first
        other, why = await say(server, OTHER, **fields)
        assert other != first and why == ""


@in_loop
async def test_an_audited_request_is_answered_by_an_engine_and_a_false_hit_stops_the_rest() -> None:
    async with running(counts, router=router(audit=1.0, max_false=0.1, agreement=1.0)) as server:
        first, _ = await say(server, ASKED)
        other, why = await say(server, OTHER)
        assert other != first and why == ""
        _, _, data = await server.get("/engine/counters")
    counted = {each["name"]: each["values"] for each in json.loads(data)["metrics"] if "values" in each}
    assert counted["engine_answer_cache_audits_total"] == {"agreed": 0, "false": 1}
    low, high = (counted["engine_answer_cache_false_hit_ratio"][bound] for bound in ("low", "high"))
    assert 0.1 < low < high == 1.0 and counted["engine_answer_cache_suspended"] == {"": 1}
