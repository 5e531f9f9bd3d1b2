"""``Generate`` as the official client sees it: ``engine.grpc.generating``, ``engine.grpc.requests``,
``engine.grpc.responses``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb

from engine.contracts.config import AutoscaleSettings, FleetSettings
from engine.contracts.events import RejectedEvent, RequestEvent
from engine.contracts.router import ToUrl

from ..http.fakes import completion
from ..service.fakes import END, MAX_LEN, VOCAB, ids, in_loop, says
from ..service.test_keys import entry, written
from .fakes import request, running, tokens_of, until


@in_loop
async def test_a_stream_has_each_token_once_and_ends_with_how_it_ended() -> None:
    async with running() as server:
        *chunks, last = await server.generate()
        assert all(message.WhichOneof("response") == "chunk" for message in chunks)
        assert tokens_of(chunks) == [*ids("Hello world"), END]
        assert sum(message.chunk.completion_tokens for message in chunks) == 12
        complete = last.complete
        assert (complete.finish_reason, list(complete.output_ids)) == ("stop", [])
        assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (2, 12, 4)
        assert (complete.spec_draft_tokens, complete.spec_accepted_tokens) == (3, 2)
        assert complete.WhichOneof("matched_stop") is None


@in_loop
async def test_an_answer_that_is_not_streamed_is_one_message_with_all_tokens() -> None:
    async with running() as server:
        (message,) = await server.generate(stream=False)
        assert list(message.complete.output_ids) == [*ids("Hello world"), END]
        assert message.complete.completion_tokens == 12


@in_loop
async def test_token_ids_are_taken_as_they_are() -> None:
    async with running() as server:
        asked = request()
        asked.tokenized.CopyFrom(pb.TokenizedInput(input_ids=[5, 6, 7], original_text="of no effect"))
        assert [message async for message in server.stub.Generate(asked)]
        assert server.client.requests[-1].prompt == (5, 6, 7)


@in_loop
async def test_choices_are_told_apart_and_each_has_an_end() -> None:
    async with running() as server:
        for stream in (True, False):
            messages = await server.generate(n=3, stream=stream)
            ends = [message.complete for message in messages if message.WhichOneof("response") == "complete"]
            assert sorted(end.index for end in ends) == [0, 1, 2]
            assert {end.completion_tokens for end in ends} == {12}
            assert len(tokens_of(messages)) == 36


@in_loop
async def test_stop_strings_and_stop_tokens_are_named() -> None:
    async with running() as server:
        last = (await server.generate(stop=["wor"]))[-1].complete
        assert (last.finish_reason, last.matched_stop_str) == ("stop", "wor")
        last = (await server.generate(stop_token_ids=[END]))[-1].complete
        assert (last.finish_reason, last.matched_token_id) == ("stop", END)
        last = (await server.generate(max_tokens=3))[-1].complete
        assert (last.finish_reason, last.completion_tokens) == ("length", 3)


@in_loop
async def test_log_probabilities_of_output_and_prompt_have_as_many_alternatives_as_were_asked_for() -> None:
    async with running() as server:
        first, *_ = await server.generate(logprobs=1, prompt_logprobs=3)
        prompt, output = first.chunk.input_logprobs, first.chunk.output_logprobs
        assert list(prompt.token_ids) == [*ids("hi")]
        assert [entry.HasField("value") for entry in prompt.token_logprobs] == [False, True]
        assert [len(top.token_ids) for top in prompt.top_logprobs] == [0, 3]
        assert list(output.token_ids) == [*ids("H")] and list(output.token_logprobs) == [-0.5]
        assert [len(top.values) for top in output.top_logprobs] == [1]
        (whole,) = await server.generate(stream=False, logprobs=0)
        assert len(whole.complete.output_logprobs.token_ids) == 11 and not whole.complete.output_logprobs.top_logprobs
        assert not whole.complete.HasField("input_logprobs")


@in_loop
async def test_the_engine_is_asked_for_the_same_as_over_http() -> None:
    params = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 7,
        "min_p": 0.25,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "seed": 11,
        "min_tokens": 1,
        "stop_token_ids": [3],
        "ignore_eos": True,
    }
    async with running() as server:
        await server.generate(logit_bias={5: 1.5}, **params)
        body = completion("hi", max_tokens=100, logit_bias={"5": 1.5}, **params)
        assert (await server.post("/v1/completions", body))[0] == 200
        over_grpc, over_http = [asked.sampling for asked in server.client.requests]
        assert over_grpc == over_http


@in_loop
async def test_what_is_left_out_means_what_it_means_over_http() -> None:
    async with running() as server:
        asked = pb.GenerateRequest(text="hi", stream=True)
        assert [message async for message in server.stub.Generate(asked)]
        await server.post("/v1/completions", completion("hi", max_tokens=-1))
        over_grpc, over_http = [asked.sampling for asked in server.client.requests]
        assert over_grpc == over_http and over_grpc.max_tokens == MAX_LEN - 2
        await server.generate(max_tokens=2**32 - 1, top_k=2**32 - 1)  # -1 as an unsigned number
        assert server.client.requests[-1].sampling == over_grpc


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"text": ""}, "INVALID_ARGUMENT", "empty"),
        ({"text": "a" * 1000}, "INVALID_ARGUMENT", "at most 256"),
        ({"temperature": 9}, "INVALID_ARGUMENT", "temperature"),
        ({"temperature": float("nan")}, "INVALID_ARGUMENT", "temperature"),
        ({"repetition_penalty": -1.0}, "INVALID_ARGUMENT", "repetition_penalty"),
        ({"n": 2**31}, "INVALID_ARGUMENT", "'n'"),
        ({"n": 9}, "INVALID_ARGUMENT", "server.max_n"),
        ({"logprobs": -1}, "INVALID_ARGUMENT", "logprobs"),
        ({"stop": [""]}, "INVALID_ARGUMENT", "stop"),
        ({"stop_token_ids": [VOCAB]}, "INVALID_ARGUMENT", "outside the vocabulary"),
        ({"logit_bias": {-1: 1.0}}, "INVALID_ARGUMENT", "logit_bias"),
        ({"json_schema": "{"}, "INVALID_ARGUMENT", "not valid JSON"),
        ({"structural_tag": "x"}, "UNIMPLEMENTED", "structural_tag"),
        ({"truncate_prompt_tokens": 3}, "UNIMPLEMENTED", "truncate_prompt_tokens"),
    ],
)
@in_loop
async def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], status: str, words: str) -> None:
    async with running(max_n=8) as server:
        found, said, _ = await server.refused(server.stub.Generate(request(**fields)))
        assert (found, words in said) == (status, True), said
        assert server.client.requests == [] and server.server.state.admission.in_flight == 0


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, "INVALID_ARGUMENT"),
        ({"tokenized": pb.TokenizedInput()}, "INVALID_ARGUMENT"),
        ({"tokenized": pb.TokenizedInput(input_ids=[VOCAB])}, "INVALID_ARGUMENT"),
        ({"tokenized": pb.TokenizedInput(input_ids=[2**32 - 1])}, "INVALID_ARGUMENT"),
        ({"tokenized": pb.TokenizedInput(input_ids=[1] * 10_000)}, "INVALID_ARGUMENT"),
        ({"text": "a", "media_refs": pb.MediaRefs()}, "INVALID_ARGUMENT"),
        ({"text": "a", "data_parallel_rank": 1}, "INVALID_ARGUMENT"),
        ({"text": "a", "kv_transfer_params_json": "{}"}, "UNIMPLEMENTED"),
    ],
)
@in_loop
async def test_a_prompt_that_is_none_and_parts_that_are_not_served_are_refused(
    fields: dict[str, Any], status: str
) -> None:
    async with running() as server:
        assert (await server.refused(server.stub.Generate(pb.GenerateRequest(**fields))))[0] == status
        assert server.client.requests == []


@in_loop
async def test_a_router_that_names_a_server_of_http_is_not_followed() -> None:
    async with running() as server:
        server.router.decision = ToUrl("http://127.0.0.1:1")
        assert await server.status() == "UNIMPLEMENTED"


@in_loop
async def test_a_client_that_goes_away_frees_its_place_and_its_sequence() -> None:
    async with running() as server:
        server.client.hold_before = 3
        call = server.stub.Generate(request())
        async for _ in call:
            break
        await server.client.holding.wait()
        call.cancel()
        async with asyncio.timeout(10):
            await server.client.abort_seen.wait()
        await until(lambda: server.server.state.admission.in_flight == 0)
        assert server.server.state.engine.load.sequences == 0


@in_loop
async def test_the_deadline_of_a_call_ends_its_sequence() -> None:
    async with running() as server:
        server.client.hold_before = 3
        assert (await server.refused(server.stub.Generate(request(), timeout=0.2)))[0] == "DEADLINE_EXCEEDED"
        async with asyncio.timeout(10):
            await server.client.abort_seen.wait()
        await until(lambda: server.server.state.admission.in_flight == 0)


@in_loop
async def test_a_request_that_fails_in_the_engine_is_internal_and_one_of_a_dead_engine_is_unavailable() -> None:
    async with running() as server:
        server.client.fail_request = "a plugin broke"
        status, words, _ = await server.refused(server.stub.Generate(request()))
        assert status == "INTERNAL" and "a plugin broke" in words
        server.client.fail_request, server.client.hold_before = "", 3
        call = asyncio.create_task(server.refused(server.stub.Generate(request())))
        await server.client.holding.wait()
        server.client.die()
        status, _, more = await call
        assert (status, more["error-code"], more["retry-after"]) == ("UNAVAILABLE", "engine_dead", "5")


@in_loop
async def test_a_full_server_and_one_that_drains_say_when_to_ask_again() -> None:
    async with running(max_queue=1) as server:
        server.client.hold_before = 1
        task = asyncio.create_task(server.generate())
        await server.client.holding.wait()
        status, _, more = await server.refused(server.stub.Generate(request()))
        assert (status, more["error-code"]) == ("RESOURCE_EXHAUSTED", "queue_full") and int(more["retry-after"]) >= 1
        server.client.proceeding.set()
        assert len(tokens_of(await task)) == 12
        server.server.state.admission.draining = True
        status, _, more = await server.refused(server.stub.Generate(request()))
        assert (status, more["error-code"]) == ("UNAVAILABLE", "draining")
        await until(lambda: len(server.events(RejectedEvent)) == 2)
        assert [event.status for event in server.events(RejectedEvent)] == [429, 503]


@in_loop
async def test_tenants_have_caches_priorities_and_limits_of_their_own(tmp_path: Path) -> None:
    entries = [entry("ann", "key-of-ann", tenant="acme"), entry("night", "key-of-night", priority=7, max_sequences=2)]
    async with running(keys=written(tmp_path, entries)) as server:
        ann, night = [(("authorization", f"Bearer key-of-{name}"),) for name in ("ann", "night")]
        await server.generate(ann)
        await server.post("/v1/completions", completion("hi"), "Authorization: Bearer key-of-ann")
        await server.generate(night)
        of_ann, over_http, of_night = server.client.requests
        assert of_ann.cache_salt == over_http.cache_salt != of_night.cache_salt
        assert (of_ann.client, of_ann.priority, of_night.priority) == ("tenant:acme", 0, 7)
        status, _, more = await server.refused(server.stub.Generate(request(n=3), metadata=night))
        assert (status, more["error-code"]) == ("RESOURCE_EXHAUSTED", "key_limit")


@in_loop
async def test_requests_over_grpc_are_accounted_for_like_others() -> None:
    async with running() as server:
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        await server.generate((("traceparent", parent),))
        await until(lambda: len(server.events(RequestEvent)) == 1)
        (event,) = server.events(RequestEvent)
        assert (event.prompt_tokens, event.output_tokens) == (2, 12) and event.request_id.startswith("gen-")
        assert event.traceparent == parent


@in_loop
async def test_many_calls_that_are_cancelled_leave_nothing() -> None:
    async with running(says("a" * 200)) as server:
        server.client.hold_before = 5
        calls = [server.stub.Generate(request()) for _ in range(100)]
        await until(lambda: server.server.state.admission.in_flight > 50)
        for call in calls:
            call.cancel()
        state = server.server.state
        await until(lambda: not state.admission.in_flight and not state.engine.load.sequences)
        assert len({name for name, _ in server.client.aborted}) == len(server.client.requests)


@in_loop
async def test_a_call_waits_for_an_engine_where_there_may_be_none() -> None:
    fleet = FleetSettings(autoscale=AutoscaleSettings(min=0, max=1))
    async with running(fleet=fleet) as server:
        await server.server.state.engine.supervisor.stop()
        scaling = asyncio.create_task(server.server.state.scaler.run())
        assert len(tokens_of(await server.generate())) == 12
        assert server.server.state.admission.in_flight == server.server.state.scaler.held == 0
        scaling.cancel()
