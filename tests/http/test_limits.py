"""What one request, one body or one client may take of the server."""

from __future__ import annotations

import asyncio
import json
from array import array
from typing import Any

import msgspec
import pytest

from engine.http import answering, bodies
from engine.http.errors import error_body
from engine.service import body_parser, validation
from engine.service.admission import Admission
from engine.service.body_parser import BodyParser
from engine.service.chat_template import TemplateSource
from engine.service.errors import ApiError
from engine.service.parsing import (
    Limits,
    ParsedChat,
    ParsedCompletion,
    ParsedDetokenize,
    ParsedTokenize,
    parse,
    unpack,
)
from engine.service.template_worker import TemplateWorker

from ..service.fakes import MODEL, VOCAB, in_loop
from ..service.test_template_worker import ON_REQUEST, TOO_LONG
from .fakes import chat, completion, running

LIMITS = Limits(model=MODEL, max_n=4, max_len=100, vocab_size=VOCAB, most_tokens=200)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def refused(kind: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(kind, json.dumps(fields).encode(), LIMITS)
    return caught.value


def test_prompts_are_counted_before_anything_is_done_for_each_of_them() -> None:
    error = refused(ParsedCompletion, prompt=[["not ids"]] * 5)
    assert error.kind == "invalid"  # of the wrong type, which is found while decoding
    for prompt in ([[1]] * 5, ["a"] * 5):
        assert "5 prompts x n=1" in refused(ParsedCompletion, prompt=prompt).message
    assert "1 prompts x n=5" in refused(ParsedCompletion, prompt="a", n=5).message
    assert "1 prompts x n=5" in refused(ParsedChat, messages=[{"role": "user", "content": "a"}], n=5).message


def test_more_messages_or_ids_than_the_model_takes_tokens_are_refused_while_parsing() -> None:
    turn = {"role": "user", "content": ""}
    assert refused(ParsedChat, messages=[turn] * 101).code == "context_length_exceeded"
    assert refused(ParsedTokenize, messages=[turn] * 101).code == "context_length_exceeded"
    assert refused(ParsedCompletion, prompt=[1] * 101).code == "context_length_exceeded"
    assert "at most 200" in refused(ParsedDetokenize, tokens=[1] * 201).message
    assert len(parse(ParsedChat, json.dumps({"messages": [turn] * 100}).encode(), LIMITS).conversation.turns) == 100


def test_ids_outside_the_vocabulary_are_refused_while_parsing() -> None:
    assert refused(ParsedCompletion, prompt=[[0], [VOCAB]]).param == "prompt"
    assert refused(ParsedDetokenize, tokens=[VOCAB]).param == "tokens"
    assert refused(ParsedDetokenize, tokens=[2**31]).kind == "invalid"


def test_parsed_ids_are_packed_and_the_prompt_does_not_stay_with_the_options() -> None:
    parsed = parse(ParsedCompletion, json.dumps({"prompt": [[1, 2], [3]], "n": 2}).encode(), LIMITS)
    assert [unpack(prompt) for prompt in parsed.ids] == [(1, 2), (3,)] and not parsed.texts
    assert parsed.prompts[0] == array("i", [1, 2]).tobytes()
    assert not hasattr(parsed.options, "prompt") and parsed.options.n == 2


@pytest.mark.parametrize("field", ["role", "type"])
def test_messages_repeat_at_most_200_characters_of_a_request(field: str) -> None:
    long = "x" * 50_000
    part = {"type": long} if field == "type" else {"type": "text", "text": ""}
    error = refused(ParsedChat, messages=[{"role": long if field == "role" else "user", "content": [part]}])
    assert len(error.message) < 400 and len(error.param or "") <= 128


@in_loop
async def test_large_bodies_together_have_a_limit_and_small_ones_always_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "LARGEST_AT_ONCE", 2)
    monkeypatch.setattr(bodies, "SMALL_BYTES", 1000)
    async with running(max_body_bytes=5000) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.server.port)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n".encode()
        writer.write(head + b" " * 4500)  # and never the rest
        counted = server.server.state.bodies
        while counted.taken < 3500:
            await asyncio.sleep(0)
        # Half of what there is: this address has its share.
        status, headers, data = await server.post(CHAT, b" " * 4000)
        assert (status, json.loads(data)["error"]["code"]) == (429, "bodies_full") and headers["retry-after"] == "1"
        assert (await server.post(CHAT, chat()))[0] == 200
        assert counted.taken == 3500
        writer.transport.abort()
        while counted.taken:
            await asyncio.sleep(0)


def test_one_address_takes_at_most_half_of_what_bodies_may_take() -> None:
    counted = bodies.Bodies(10)
    counted.take("a", 40)
    for client in ("a", "c"):
        with pytest.raises(ApiError, match="too many large"):
            counted.take(client, 1)
        if client == "a":
            counted.take("b", 40)
    counted.take("a", -40)
    counted.take("c", 40)


@in_loop
async def test_a_body_is_given_back_before_the_answer_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "SMALL_BYTES", 10)
    async with running() as server:
        server.client.hold_before = 0
        answer = asyncio.create_task(server.post(CHAT, chat()))
        await server.client.holding.wait()
        assert server.server.state.bodies.taken == 0
        server.client.proceeding.set()
        assert (await answer)[0] == 200
        assert server.server.state.bodies.taken == 0


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
@in_loop
async def test_tokenizing_is_under_admission(path: str) -> None:
    async with running(max_queue=1) as server:
        server.client.hold_before = 0
        first = asyncio.create_task(server.post(CHAT, chat()))
        await server.client.holding.wait()
        assert (await server.post(path, {"prompt": "a"} if path == "/tokenize" else {"tokens": [1]}))[0] == 429
        server.client.proceeding.set()
        await first
        assert (await server.post(path, {"prompt": "a"} if path == "/tokenize" else {"tokens": [1]}))[0] == 200


@in_loop
async def test_sequences_carry_their_client_and_those_of_one_request_its_group() -> None:
    async with running() as server:
        await server.post(CHAT, chat(n=2, user="ann"))
        await server.post(COMPLETIONS, completion())
        first, second, alone = server.client.requests
        assert first.client == second.client == alone.client == "address:127.0.0.1"
        assert first.group == second.group != "" and alone.group == ""


@in_loop
async def test_a_user_is_a_client_only_where_a_gateway_says_who_it_is() -> None:
    async with running(trust_user=True) as server:
        await server.post(CHAT, chat(user="ann"))
        await server.post(CHAT, chat())
        ann, nobody = server.client.requests
        assert ann.client == "user:ann" and nobody.client == "address:127.0.0.1"


@in_loop
async def test_nobody_may_be_more_urgent_than_the_operator_allows() -> None:
    async with running() as server:
        status, _, data = await server.post(CHAT, chat(priority=-1))
        assert status == 400 and "server.least_priority" in json.loads(data)["error"]["message"]
        assert (await server.post(CHAT, chat(priority=3)))[0] == 200
    async with running(least_priority=-1) as server:
        assert (await server.post(CHAT, chat(priority=-1)))[0] == 200
        assert server.client.requests[0].priority == -1


@in_loop
async def test_echoed_logprobs_are_limited_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MOST_ECHOED", 8)
    async with running() as server:
        body = completion([1, 2, 3], n=3, echo=True, logprobs=1)
        status, _, data = await server.post(COMPLETIONS, body)
        assert status == 400 and json.loads(data)["error"]["param"] == "echo" and not server.client.requests
        assert (await server.post(COMPLETIONS, body | {"n": 2}))[0] == 200


@in_loop
async def test_a_large_answer_is_written_elsewhere_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    body = completion([1, 2, 3], n=2, echo=True, logprobs=1, seed=1)
    async with running() as server:
        choices = [json.loads((await server.post(COMPLETIONS, body))[2])["choices"]]
        monkeypatch.setattr(answering, "LARGE_ANSWER", 0)
        choices += [json.loads((await server.post(COMPLETIONS, body))[2])["choices"]]
    assert choices[0] == choices[1]


@in_loop
async def test_the_place_of_an_aborted_request_is_taken_until_the_engine_knows() -> None:
    async with running() as server:
        server.client.hold_before = 0
        server.client.slow_to_abort = asyncio.Event()
        answer = asyncio.create_task(server.post(CHAT, chat(n=3)))
        await server.client.holding.wait()
        answer.cancel()
        await server.client.abort_seen.wait()
        await asyncio.sleep(0.05)
        assert server.server.state.admission.in_flight == 3
        server.client.slow_to_abort.set()
        assert await server.server.state.admission.until_idle(5)


@in_loop
async def test_a_client_that_fills_the_queue_does_not_lock_the_others_out() -> None:
    admission = Admission(max_queue=8)
    with admission.enter("many", 8):
        with pytest.raises(ApiError, match="full"):
            admission.gate("many")
        with admission.enter("few", 4):
            with pytest.raises(ApiError, match="full"):
                admission.gate("few")  # it has its half
            with admission.enter("third", 2), pytest.raises(ApiError, match="full"):
                admission.gate("third")
        with pytest.raises(ApiError, match="full"), admission.enter("few", 5):
            pass
    assert admission.in_flight == 0
    admission.gate("many")


def bodies_of_all_kinds() -> list[tuple[Any, bytes]]:
    turn = {"role": "user", "content": "é" * 50_000}
    big = "x" * 100_000
    return [
        (ParsedChat, json.dumps({"messages": [turn], "temperature": 0.5, "user": "ann"}).encode()),
        (ParsedCompletion, json.dumps({"prompt": [big, "b"], "logprobs": 2}).encode()),
        (ParsedCompletion, json.dumps({"prompt": [[1, 2, 3], [4]], "suffix": "", "metadata": big}).encode()),
        (ParsedTokenize, json.dumps({"prompt": big}).encode()),
        (ParsedDetokenize, json.dumps({"tokens": [1] * 150, "model": MODEL}).encode() + b" " * 100_000),
        (ParsedCompletion, json.dumps({"prompt": [1] * 200_000}).encode()),
        (ParsedCompletion, json.dumps({"prompt": "a", "model": big}).encode()),
        (ParsedChat, b"[" * 100_000),
    ]


@in_loop
async def test_large_bodies_are_parsed_elsewhere_with_the_same_result() -> None:
    parser = BodyParser()
    try:
        for kind, body in bodies_of_all_kinds():
            expected: Any
            try:
                expected = parse(kind, body, LIMITS)
            except ApiError as error:
                expected = error_body(error)
            try:
                got: Any = await parser.parse(kind, body, LIMITS)
            except ApiError as error:
                got = error_body(error)
            assert got == expected
    finally:
        parser.close()


@in_loop
async def test_a_body_that_cannot_be_parsed_within_limits_is_refused_and_the_next_one_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parser = BodyParser()
    kind, body = bodies_of_all_kinds()[0]
    turn = b'{"role":"user","content":"","annotations":[[]]}'
    slow = b'{"messages":[' + b",".join([turn] * 90_000) + b"]}"
    try:
        monkeypatch.setattr(body_parser, "CPU_S", 0.01)
        with pytest.raises(ApiError, match="CPU time") as refused:
            await parser.parse(kind, slow, LIMITS)
        assert refused.value.kind == "invalid"
        monkeypatch.undo()
        assert (await parser.parse(kind, body, LIMITS)).options.user == "ann"
    finally:
        parser.close()


def test_a_logit_bias_of_too_many_tokens_is_refused_while_parsing() -> None:
    bias = {str(token): 1 for token in range(2000)}
    assert refused(ParsedCompletion, prompt="a", logit_bias=bias).param == "logit_bias"
    assert refused(ParsedChat, messages=[{"role": "user", "content": "a"}], logit_bias=bias).param == "logit_bias"


@in_loop
async def test_the_client_of_a_conversation_that_breaks_a_limit_gets_400() -> None:
    async with running() as server:
        worker = TemplateWorker(TemplateSource(ON_REQUEST, {}))
        server.server.state.engine.tokenizer.template = worker
        (status, _, body), (other, _, _) = await asyncio.gather(
            server.post("/v1/chat/completions", chat("boom")), server.post("/v1/chat/completions", chat("hi"))
        )
        assert (status, other) == (400, 200)
        assert msgspec.json.decode(body)["error"]["message"] == f"The chat template {TOO_LONG}."
    assert not worker.pids
