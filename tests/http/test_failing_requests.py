"""A fault anywhere on the way of a request is that request's alone: of many, those it was put into fail."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from engine.contracts.request import EngineRequest, TokensOut
from engine.http import chat_format
from engine.loop.client import OutputStream
from engine.service import parsing, prepare
from engine.service.detokenizer import IncrementalDetokenizer
from engine.service.stops import StopMatcher
from engine.service.template_worker import TemplateWorker
from engine.service.tokenizer import Tokenizer

from ..service.fakes import END, ids, in_loop, make_tokenizer
from .fakes import Running, chat, events_of, running

CHAT = "/v1/chat/completions"
TEXT = make_tokenizer().decode_now
HOOKS = (
    "parse", "template", "tokenize", "parameters", "router", "submit", "engine", "detokenize", "stop", "format",
    "encode",
)  # fmt: skip


class Fault(Exception):
    """What no code here expects."""


def faulty(hook: str, text: str) -> None:
    """Raise if a request's text asks for it at this hook."""
    if f"<{hook}>" in text:
        raise Fault(f"put in at {hook} /secret/path 0xdeadbeef")


def inject(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, hook: str, text: Callable[..., str]) -> None:
    """Before ``owner.name`` runs, ``text`` of its arguments decides."""
    original = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        faulty(hook, text(*args, **kwargs))
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, watched)


def inject_all(monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, parsing, "turns_of", "parse", lambda messages: str(messages))
    inject(monkeypatch, TemplateWorker, "render", "template", lambda self, messages, *_: str(messages))
    inject(monkeypatch, Tokenizer, "_plain_ids", "tokenize", lambda self, text: text)
    inject(monkeypatch, prepare, "sampling_params", "parameters", lambda request, *_: request.user or "")
    inject(monkeypatch, IncrementalDetokenizer, "feed", "detokenize", lambda self, token: "<detokenize>" * (token == 1))
    inject(monkeypatch, StopMatcher, "feed", "stop", lambda self, text, *_: "<stop>" * ("\2" in text))
    inject(monkeypatch, chat_format.ChatFormat, "object", "format", lambda self, kind, choices: self.job.options.user)
    # What cannot be written as JSON.
    original = chat_format.ChatFormat.object

    def strange(self: Any, kind: str, choices: Any) -> Any:
        return original(self, kind, choices) | ({"strange": object()} if self.job.options.user == "<encode>" else {})

    monkeypatch.setattr(chat_format.ChatFormat, "object", strange)


def answer_of(request: EngineRequest) -> list[tuple[int, ...]]:
    """Repeats the number that the prompt holds, six bytes a step; the tokens 1 and 2 mark faults after it."""
    prompt = TEXT(request.prompt)
    number = prompt.partition("number ")[2].partition(".")[0]
    marks = [1] * ("<detokenize>" in prompt) + [2] * ("<stop>" in prompt)
    output = [*ids(f"it is {number}"), *marks, *ids("!"), END]
    return [tuple(output[i : i + 6]) for i in range(0, len(output), 6)]


def break_parts(server: Running) -> None:
    """The router, the engine's client and the exporter fail; the last with everything."""
    router, client = server.router, server.client
    route, submit, play = router.place, client.submit, client._play

    def faulty_route(request: Any, fleet: Any) -> Any:
        faulty("router", request.fields["user"])
        return route(request, fleet)

    def faulty_submit(request: EngineRequest) -> OutputStream:
        if request.request_id.endswith("-1"):  # the second choice
            faulty("submit", TEXT(request.prompt))
        return submit(request)

    async def faulty_play(request: EngineRequest) -> None:
        if "<engine>" not in TEXT(request.prompt):
            await play(request)
            return
        await asyncio.sleep(0)
        client._out(TokensOut(request.request_id, (100,)))
        client._out(TokensOut(request.request_id, finish_reason="error", error="logits at 0xdeadbeef"))

    def no_notes(request: Any, answer: Any) -> None:
        raise Fault("a router that cannot take notes")

    def no_export(events: Any) -> None:
        raise Fault("an exporter that cannot write")

    router.place, router.finished = faulty_route, no_notes  # type: ignore[method-assign]
    client.submit, client._play = faulty_submit, faulty_play  # type: ignore[method-assign]
    server.exporter.export = no_export  # type: ignore[method-assign]


async def outcome(server: Running, number: int, hook: str, fields: dict[str, Any]) -> str:
    """The text of an answer, or "failed" if it says so as it should."""
    text = f"what is number {number}. <{hook}>"
    status, _, data = await server.post(CHAT, chat(text, user=f"<{hook}>", **fields))
    assert b"secret" not in data and b"deadbeef" not in data
    if status != 200:
        assert status == 500 and set(json.loads(data)["error"]) == {"message", "type", "param", "code"}
        return "failed"
    if not fields["stream"]:
        return "|".join(choice["message"]["content"] for choice in json.loads(data)["choices"])
    *events, last = events_of(data)
    if "error" in last:
        return "failed"
    texts = [""] * fields["n"]
    for choice in (choice for event in (*events, last) for choice in event["choices"]):
        texts[choice["index"]] += choice["delta"].get("content", "")
    return "|".join(texts)


@pytest.mark.parametrize(("many", "faults"), [(110, 11), pytest.param(1000, 100, marks=pytest.mark.slow)])
@in_loop
async def test_a_fault_in_every_tenth_request_fails_every_tenth_request(many: int, faults: int) -> None:
    """Eleven hooks: each has a fault."""
    dice = random.Random(11)
    guilty = dict.fromkeys(dice.sample(range(many), faults), "")
    guilty = {number: HOOKS[i % len(HOOKS)] for i, number in enumerate(guilty)}
    with pytest.MonkeyPatch.context() as monkeypatch, structlog.testing.capture_logs():
        inject_all(monkeypatch)
        async with running(answer_of) as server:
            break_parts(server)
            together = asyncio.Semaphore(40)

            async def one(number: int) -> str:
                async with together:
                    hook = guilty.get(number, "none")
                    n = 2 if hook == "submit" else dice.choice((1, 1, 2))
                    fields = {"stream": dice.random() < 0.5, "n": n, "stop": ["~"]}
                    return await outcome(server, number, hook, fields)

            found = await asyncio.gather(*map(one, range(many)))
            assert {number for number, got in enumerate(found) if got == "failed"} == set(guilty)
            right = [got for number, got in enumerate(found) if set(got.split("|")) == {f"it is {number}!"}]
            assert len(right) == many - faults
            state = server.server.state
            assert await state.admission.until_idle(5) and state.admission.in_flight == 0
            assert server.client._streams == {} and state.bodies.taken == 0
            first = [r.request_id for r in server.client.requests if "<submit>" in TEXT(r.prompt)]
            assert len(first) == faults // len(HOOKS) and set(first) <= {name for name, _ in server.client.aborted}
