"""What a client gets when a target misbehaves: the sixteen faults of a public benchmark of gateways, and others.

A healthy target stands beside the one that fails, which is asked first. The whole answer of one target is what counts;
once a part of one is out, an error is. A truncated answer that looks whole never is.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import Callable

import pytest

from engine.counters.gateway import REQUESTS, RETRIES
from engine.http.sse import DeferredHeaders
from engine.service.targets import MOST_FAILURES

from ...service.fakes import MemoryExporter, in_loop
from .fakes import (
    APIS,
    CHAT,
    FOREVER_S,
    JSON,
    OLLAMA,
    SSE,
    Backend,
    Exchange,
    Fault,
    Outcome,
    backends,
    before,
    body_for,
    event,
    gateway_at,
    hang,
    healthy,
    healthy_whole,
    request_bytes,
    stream_type,
    until,
)

BOTH = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
EACH_API = pytest.mark.parametrize("path", APIS)
NOBODY_WAITS = pytest.mark.usefixtures("nobody_waits")


@pytest.fixture
def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that nobody takes fails at once."""
    monkeypatch.setattr("engine.http.gateway.passing.WAIT_S", 0.0)


def refusing(status: int, code: str = "some_code", *lines: str) -> Fault:
    async def fault(exchange: Exchange) -> None:
        await exchange.refuse(status, code, *lines)

    return fault


def streaming(*pieces: bytes, then: Callable[[Exchange], None] | None = None, ends: bool = False) -> Fault:
    """A stream of these pieces, after which something happens."""

    async def fault(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.pieces(*pieces)
        if ends:
            await exchange.end()
        if then is not None:
            then(exchange)

    return fault


def part_of_stream(then: Callable[[Exchange], None] | None, *, ends: bool = False, words: int = 3) -> Fault:
    """So many words of the answer, after which something happens."""

    async def fault(exchange: Exchange) -> None:
        begins = exchange.asked.path != OLLAMA
        await streaming(*exchange.stream[: words + begins], then=then, ends=ends)(exchange)

    return fault


async def reset(exchange: Exchange) -> None:
    exchange.reset()


async def cut(exchange: Exchange) -> None:
    exchange.cut()


def moved(outcome: Outcome, target: Backend) -> bool:
    """Whether it is the whole answer of this target, which is the second that was asked."""
    headers = outcome.headers
    assert (headers["x-target"], headers["x-attempt"]) == (target.id, "2"), outcome
    return (outcome.kind, outcome.words, outcome.status) == ("answer", target.words, 200)


def broke_off(outcome: Outcome, target: Backend) -> bool:
    """Whether it is a part of this target's answer and of no other, which ends in an error."""
    said = outcome.words
    return outcome.kind == "error" and bool(said) and said == target.words[: len(said)] and outcome.status == 200


# The sixteen faults.


@BOTH
@in_loop
async def test_a_429_with_retry_after_moves_the_request_to_a_target_that_is_free(stream: bool) -> None:
    a, b = Backend("a", [refusing(429, "rate_limit", "Retry-After: 2")]), Backend("b")
    async with before(a, b) as client:
        assert moved(await client.ask(stream=stream), b)
        assert len(a.asked) == 1
        assert client.target(a).breaker.failures == 0, "it works, and has too much to do"


@BOTH
@in_loop
async def test_a_429_of_all_targets_is_the_answer_with_its_retry_after_and_each_is_asked_once(stream: bool) -> None:
    servers = [Backend(name, then=refusing(429, "rate_limit", "Retry-After: 7")) for name in "ab"]
    async with before(*servers) as client:
        outcome = await client.ask(stream=stream)
        assert (outcome.kind, outcome.status, outcome.headers["retry-after"]) == ("error", 429, "7")
        assert json.loads(outcome.body)["error"]["code"] == "rate_limit"
        assert [len(server.asked) for server in servers] == [1, 1]


@BOTH
@in_loop
async def test_a_500_moves_the_request_and_the_target_is_asked_again_by_the_next_one(stream: bool) -> None:
    a, b = Backend("a", [refusing(500)]), Backend("b")
    async with before(a, b) as client:
        assert moved(await client.ask(stream=stream), b)
        outcome = await client.ask(stream=stream)
        assert (outcome.kind, outcome.words, outcome.headers["x-attempt"]) == ("answer", a.words, "1")


@pytest.mark.parametrize("status", [408, 500, 502, 503, 504, 529])
@in_loop
async def test_a_target_that_always_fails_is_left_alone_after_three_requests(status: int) -> None:
    a, b = Backend("a", then=refusing(status)), Backend("b")
    async with before(a, b) as client:
        for _ in range(MOST_FAILURES):
            assert moved(await client.ask(), b)
        for _ in range(3):
            outcome = await client.ask()
            assert (outcome.words, outcome.headers["x-attempt"]) == (b.words, "1")
        assert len(a.asked) == MOST_FAILURES


@in_loop
async def test_a_target_that_always_fails_is_asked_where_there_is_no_other() -> None:
    a = Backend("a", then=refusing(500))
    async with before(a) as client:
        for _ in range(MOST_FAILURES + 2):
            assert (await client.ask()).status == 500
        assert client.target(a).breaker.is_open
        assert (await client.json("/ready"))["status"] == "ready"
        a.then = healthy
        assert (await client.ask()).words == a.words


@BOTH
@in_loop
async def test_a_reset_before_any_byte_moves_the_request(stream: bool) -> None:
    a, b = Backend("a", [reset]), Backend("b")
    async with before(a, b) as client:
        assert moved(await client.ask(stream=stream), b)
        assert len(a.asked) == 1


@BOTH
@in_loop
async def test_a_target_that_never_answers_loses_the_request_and_is_hung_up_on(stream: bool) -> None:
    a, b = Backend("a", [hang]), Backend("b")
    async with before(a, b, first_byte_s=0.3) as client:
        assert moved(await client.ask(stream=stream), b)
        await asyncio.wait_for(a.left.wait(), 10)
        assert len(a.asked) == 1


@BOTH
@in_loop
async def test_headers_do_not_count_as_a_beginning(stream: bool) -> None:
    async def only_headers(exchange: Exchange) -> None:
        await (exchange.begin() if stream else exchange.head(200, f"Content-Type: {JSON}", "Content-Length: 999"))
        await exchange.until_gone()

    a, b = Backend("a", [only_headers]), Backend("b")
    async with before(a, b, first_byte_s=0.3) as client:
        assert moved(await client.ask(stream=stream), b)


@EACH_API
@pytest.mark.parametrize("how", ["closed", "reset"])
@in_loop
async def test_a_stream_that_dies_in_mid_answer_ends_in_an_error(path: str, how: str) -> None:
    a, b = Backend("a", [part_of_stream(Exchange.cut if how == "closed" else Exchange.reset)]), Backend("b")
    async with before(a, b) as client:
        outcome = await client.ask(path)
        # A reset may overtake what was sent before it: then nothing was out, and the request has moved.
        assert broke_off(outcome, a) if how == "closed" or outcome.kind == "error" else moved(outcome, b)
        assert len(b.asked) == (outcome.kind == "answer")


@EACH_API
@in_loop
async def test_a_stream_that_stalls_ends_in_an_error_and_the_next_request_is_served(path: str) -> None:
    async def stall(exchange: Exchange) -> None:
        await part_of_stream(None)(exchange)
        await exchange.until_gone()

    a, b = Backend("a", [stall]), Backend("b")
    async with before(a, b, silence_s=0.3) as client:
        outcome = await client.ask(path)
        assert broke_off(outcome, a) and outcome.words == a.words[:3] and not b.asked
        assert b"silent" in outcome.body
        await asyncio.wait_for(a.left.wait(), 10)
        assert (await client.ask(path)).words == a.words


@in_loop
async def test_an_event_that_is_no_json_is_passed_on_with_the_rest() -> None:
    async def malformed(exchange: Exchange) -> None:
        first, *rest = exchange.stream
        await streaming(first, b'data: {"choices": [{"delta": {"content": \n\n', *rest, ends=True)(exchange)

    a, b = Backend("a", [malformed]), Backend("b")
    async with before(a, b) as client:
        outcome = await client.ask()
        assert (outcome.kind, outcome.words) == ("answer", a.words) and not b.asked


@in_loop
async def test_a_chat_that_is_whole_without_done_is_no_failure() -> None:
    async def no_done(exchange: Exchange) -> None:
        pieces = [piece.replace(b"data: [DONE]\n\n", b"") for piece in exchange.stream]
        await streaming(*pieces, ends=True)(exchange)

    a, b = Backend("a", then=no_done), Backend("b")
    async with before(a, b) as client:
        outcome = await client.ask()
        assert (outcome.kind, outcome.words) == ("answer", a.words)
        assert client.target(a).breaker.failures == 0
        assert (await client.ask(n=2)).kind == "error", "the other choice may have been cut"


@BOTH
@in_loop
async def test_a_prompt_that_is_too_long_is_tried_where_the_context_may_be_longer(stream: bool) -> None:
    a, b = Backend("a", then=refusing(400, "context_length_exceeded")), Backend("b")
    async with before(a, b) as client:
        assert moved(await client.ask(stream=stream), b)
        assert len(a.asked) == 1
        assert client.target(a).breaker.failures == 0
        for target, longest in ((a.id, 64), (b.id, 64)):
            client.gateway.state.targets[target].models["tiny"] = {"max_model_len": longest}
        outcome = await client.ask(stream=stream)
        assert (outcome.kind, outcome.status) == ("error", 400)
        assert json.loads(outcome.body)["error"]["code"] == "context_length_exceeded"
        assert (len(a.asked), len(b.asked)) == (2, 1), "no target of the same length is asked"


@BOTH
@in_loop
async def test_what_a_target_refuses_for_its_content_is_refused(stream: bool) -> None:
    a, b = Backend("a", then=refusing(400, "content_policy_violation")), Backend("b")
    async with before(a, b) as client:
        outcome = await client.ask(stream=stream)
        assert (outcome.kind, outcome.status) == ("error", 400)
        assert json.loads(outcome.body)["error"]["code"] == "content_policy_violation"
        assert (len(a.asked), len(b.asked)) == (1, 0)


@in_loop
async def test_nobody_is_asked_to_go_on_from_a_part_of_an_answer() -> None:
    a, b = Backend("a", [part_of_stream(Exchange.cut)]), Backend("b", then=refusing(400, "invalid_prefill"))
    async with before(a, b) as client:
        outcome = await client.ask()
        assert broke_off(outcome, a) and not b.asked
        assert b"prefill" not in outcome.body and b"broke off" in outcome.body


@in_loop
async def test_a_target_that_was_down_for_a_while_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = Backend("a", then=refusing(503)), Backend("b")
    async with before(a, b) as client:
        now = [0.0]
        breaker = client.target(a).breaker
        monkeypatch.setattr(breaker, "_clock", lambda: now[0])
        while now[0] < 60:
            assert (await client.ask()).words == b.words
            now[0] += 4
        assert len(a.asked) < 10, "it is mostly left alone"
        a.then = healthy
        while (await client.ask()).words != a.words:
            now[0] += 4
        assert now[0] <= 76


@in_loop
async def test_an_answer_is_counted_for_the_target_that_gave_it() -> None:
    exporter = MemoryExporter()
    a, b = Backend("a", then=refusing(503)), Backend("b")
    async with before(a, b, exporters=[exporter]) as client:
        outcome = await client.ask(stream_options={"include_usage": True})
        assert moved(outcome, b) and b'"completion_tokens": 6' in outcome.body
        assert await client.counted(REQUESTS) == {a.id: {}, b.id: {"200": 1}}
        assert await client.counted(RETRIES) == {a.id: {}, b.id: {"": 1}}


@in_loop
async def test_a_stream_that_ends_in_an_error_is_counted_with_the_status_of_that() -> None:
    own = event({"error": {"message": "no", "type": "invalid_request_error"}})
    faults = [part_of_stream(Exchange.cut), streaming(error_of(CHAT), ends=True), streaming(own, ends=True)]
    a = Backend("a", faults)
    async with before(a) as client:
        for _ in range(4):
            await client.ask()
        assert await client.counted(REQUESTS) == {a.id: {"502": 2, "400": 1, "200": 1}}


# Other faults of streams.


@EACH_API
@in_loop
async def test_a_stream_that_is_cut_cleanly_in_mid_answer_ends_in_an_error(path: str) -> None:
    a, b = Backend("a", [part_of_stream(None, ends=True)]), Backend("b")
    async with before(a, b) as client:
        outcome = await client.ask(path)
        assert broke_off(outcome, a) and outcome.words == a.words[:3] and not b.asked


@EACH_API
@pytest.mark.parametrize("ends", [True, False], ids=["cleanly", "cut"])
@in_loop
async def test_a_stream_without_a_byte_moves_the_request(path: str, ends: bool) -> None:
    a, b = Backend("a", [streaming(then=Exchange.cut, ends=ends)]), Backend("b")
    async with before(a, b) as client:
        assert moved(await client.ask(path), b)


@in_loop
async def test_comments_are_no_beginning() -> None:
    comments = streaming(b": keepalive\n", b": keepalive\n\n", then=Exchange.cut)
    a, b = Backend("a", [comments]), Backend("b")
    async with before(a, b) as client:
        outcome = await client.ask()
        assert (outcome.kind, outcome.words) == ("answer", b.words)
        assert outcome.body.startswith(b": keepalive\n")


@pytest.mark.parametrize("comment", [b": keepalive\n\n", b": keepalive\n", b":"])
@in_loop
async def test_a_comment_in_front_of_content_does_not_hide_it(comment: bytes) -> None:
    async def cut_after(exchange: Exchange) -> None:
        await streaming(comment + b"\n" * (comment == b":") + b"".join(exchange.stream[:3]), then=Exchange.cut)(
            exchange
        )

    a, b = Backend("a", [cut_after]), Backend("b")
    async with before(a, b) as client:
        outcome = await client.ask()
        assert broke_off(outcome, a) and outcome.words == a.words[:2] and not b.asked


@in_loop
async def test_a_comment_that_is_cut_off_never_swallows_what_another_target_says() -> None:
    a, b = Backend("a", [streaming(b": keepal", then=Exchange.cut)]), Backend("b")
    async with before(a, b) as client:
        outcome = await client.ask()
        assert outcome.kind == "error" or outcome.words == b.words


@EACH_API
@pytest.mark.parametrize("how", ["closed", "hung"])
@in_loop
async def test_what_happens_after_the_end_of_a_stream_adds_nothing_to_it(path: str, how: str) -> None:
    async def after_the_end(exchange: Exchange) -> None:
        await streaming(*exchange.stream)(exchange)
        if how == "hung":
            await exchange.until_gone()
        exchange.cut()

    a, b = Backend("a", [after_the_end]), Backend("b")
    async with before(a, b, silence_s=0.3) as client:
        outcome = await client.ask(path)
        assert (outcome.kind, outcome.words) == ("answer", a.words)
        assert outcome.body == b"".join(Exchange.of(path, "a").stream) and not b.asked


@EACH_API
@pytest.mark.parametrize("then", ["ends", "closed"])
@in_loop
async def test_an_error_event_of_the_target_is_the_last_one(path: str, then: str) -> None:
    async def fails(exchange: Exchange) -> None:
        pieces = [*exchange.stream[:4], error_of(path)]
        await streaming(*pieces, ends=then == "ends", then=Exchange.cut if then == "closed" else None)(exchange)

    a, b = Backend("a", [fails]), Backend("b")
    async with before(a, b) as client:
        outcome = await client.ask(path)
        assert broke_off(outcome, a) and not b.asked
        assert outcome.body.count(b'"error"') == error_of(path).count(b'"error"')


def error_of(path: str) -> bytes:
    """An error event as a server of this API sends it."""
    if path == OLLAMA:
        return b'{"error": "out of memory"}\n'
    error = {"message": "out of memory", "type": "server_error"}
    return event({"error": error}) if path == CHAT else event({"type": "error", "error": error}, "error")


@EACH_API
@pytest.mark.parametrize("comments", [False, True])
@in_loop
async def test_an_error_event_before_any_content_moves_the_request(path: str, comments: bool) -> None:
    comment = b": keepalive\n" if comments and path != OLLAMA else b""
    a, b = Backend("a", [streaming(*[comment] * bool(comment), error_of(path), ends=True)]), Backend("b")
    async with before(a, b) as client:
        outcome = await client.ask(path)
        assert (outcome.kind, outcome.words) == ("answer", b.words)
        assert client.target(a).breaker.failures == 1


@EACH_API
@pytest.mark.parametrize("comments", [False, True])
@in_loop
async def test_an_error_event_of_all_targets_is_the_answer(path: str, comments: bool) -> None:
    comment = b": keepalive\n" if comments and path != OLLAMA else b""
    says_error = streaming(*[comment] * bool(comment), error_of(path), ends=True)
    servers = [Backend(name, then=says_error) for name in "ab"]
    async with before(*servers) as client:
        outcome = await client.ask(path)
        assert (outcome.kind, outcome.status) == ("error", 200)
        assert outcome.body.replace(b": keepalive\n", b"") == error_of(path)
        assert [len(server.asked) for server in servers] == [1, 1]


@in_loop
async def test_an_error_event_that_is_the_requests_own_is_the_answer() -> None:
    own = event({"error": {"message": "no", "type": "invalid_request_error"}})
    a, b = Backend("a", [streaming(own, b"data: [DONE]\n\n", ends=True)]), Backend("b")
    async with before(a, b) as client:
        outcome = await client.ask()
        assert (outcome.kind, outcome.body) == ("error", own + b"data: [DONE]\n\n") and not b.asked
        assert outcome.headers["content-type"].startswith("text/event-stream")


@in_loop
async def test_an_error_event_after_which_nothing_comes_moves_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.http.gateway.passing.REFUSAL_S", 0.2)

    async def says_error_and_hangs(exchange: Exchange) -> None:
        await streaming(error_of(CHAT))(exchange)
        await exchange.until_gone()

    a, b = Backend("a", [says_error_and_hangs]), Backend("b")
    async with before(a, b) as client:
        assert moved(await client.ask(), b)


@in_loop
async def test_a_key_that_is_refused_after_a_comment_is_out_ends_the_stream_in_an_error() -> None:
    a, b = Backend("a", [streaming(b": keepalive\n", then=Exchange.cut)]), Backend("b", then=refusing(401))
    async with before(a, b) as client:
        outcome = await client.ask()
        assert (outcome.kind, outcome.status) == ("error", 200) and outcome.body.count(b'"error"') == 1
        assert b"key_env" in outcome.body and b"HTTP/1.1" not in outcome.body


# Other faults of whole answers.


@BOTH
@in_loop
async def test_a_header_that_cannot_be_sent_is_left_out(stream: bool) -> None:
    async def odd(exchange: Exchange) -> None:
        body = b"".join(exchange.stream) if stream else exchange.whole
        kind = (SSE if stream else JSON) + "; odd=\x01"
        await exchange.reply(200, body, kind, "Vary: \xff", "Retry-After: 3")

    a = Backend("a", [odd])
    async with before(a) as client:
        status, headers, body = await client.request("POST", CHAT, body_for(CHAT, stream))
        assert (status, headers["retry-after"]) == (200, "3") and b"a5" in body
        assert "odd" not in headers["content-type"]


@BOTH
@in_loop
async def test_a_target_that_says_too_much_loses_the_request(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.http.gateway.passing.MOST_ANSWER_BYTES", 1000)

    async def endless(exchange: Exchange) -> None:
        await exchange.begin(stream_type(CHAT) if stream else JSON)
        piece = error_of(CHAT) if stream else b" " * 100
        while True:
            await exchange.pieces(piece)

    a, b = Backend("a", [endless]), Backend("b")
    async with before(a, b) as client:
        assert moved(await client.ask(stream=stream), b)


async def truncated(exchange: Exchange) -> None:
    await exchange.head(200, f"Content-Type: {JSON}", f"Content-Length: {len(exchange.whole)}")
    await exchange.send(exchange.whole[:-20])
    exchange.cut()


async def truncated_without_length(exchange: Exchange) -> None:
    await exchange.head(200, f"Content-Type: {JSON}", "Connection: close")
    await exchange.send(exchange.whole[:-20])
    exchange.cut()


async def looks_whole(exchange: Exchange) -> None:
    await exchange.reply(200, exchange.whole[:-20] + b"}")


async def malformed(exchange: Exchange) -> None:
    await exchange.reply(200, exchange.whole[:-20] + b'"oops')


async def empty(exchange: Exchange) -> None:
    await exchange.reply(200, b"")


async def page(exchange: Exchange) -> None:
    await exchange.reply(200, b"<html>Welcome to the router</html>", "text/html")


async def no_object(exchange: Exchange) -> None:
    await exchange.reply(200, b"[1, 2]")


async def elsewhere(exchange: Exchange) -> None:
    await exchange.reply(307, b"", JSON, "Location: http://127.0.0.1:1/v1/chat/completions")


async def no_content(exchange: Exchange) -> None:
    await exchange.head(204)


async def garbage(exchange: Exchange) -> None:
    await exchange.send(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    await exchange.until_gone()


WRONG = (
    garbage,
    elsewhere,
    no_content,
    truncated,
    truncated_without_length,
    looks_whole,
    malformed,
    empty,
    page,
    no_object,
    cut,
)


@EACH_API
@pytest.mark.parametrize("fault", WRONG)
@in_loop
async def test_what_is_no_whole_answer_moves_the_request(path: str, fault: Fault) -> None:
    a, b = Backend("a", [fault]), Backend("b")
    async with before(a, b) as client:
        assert moved(await client.ask(path, stream=False), b)


async def coded(exchange: Exchange) -> None:
    await exchange.reply(200, gzip.compress(b"".join(exchange.stream)), SSE, "Content-Encoding: gzip")


@pytest.mark.parametrize("fault", [*WRONG, healthy_whole, coded])
@in_loop
async def test_what_is_no_stream_moves_a_request_for_one(fault: Fault) -> None:
    a, b = Backend("a", [fault]), Backend("b")
    async with before(a, b) as client:
        assert moved(await client.ask(), b)


@BOTH
@in_loop
async def test_a_request_under_which_two_targets_break_off_is_sent_to_no_third(stream: bool) -> None:
    a, b, c = Backend("a", [cut]), Backend("b", [cut]), Backend("c")
    async with before(a, b, c) as client:
        outcome = await client.ask(stream=stream)
        assert (outcome.kind, outcome.status, len(c.asked)) == ("error", 502, 0)


# Targets that cannot be reached.


@BOTH
@in_loop
async def test_a_refused_connection_moves_the_request(stream: bool) -> None:
    a, b = Backend("a"), Backend("b")
    async with before(a, b, probe_s=5.0) as client:
        await a.stop()
        assert moved(await client.ask(stream=stream), b)
        assert client.target(a).why_not == "cannot be reached"


@NOBODY_WAITS
@BOTH
@in_loop
async def test_a_request_fails_where_no_target_can_be_reached(stream: bool) -> None:
    a, b = Backend("a"), Backend("b")
    async with before(a, b, probe_s=5.0) as client:
        await a.stop()
        await b.stop()
        outcome = await client.ask(stream=stream)
        assert (outcome.kind, outcome.status) == ("error", 502)
        outcome = await client.ask(stream=stream)
        assert (outcome.kind, outcome.status) == ("error", 503), "and the next one is told at once"


@in_loop
async def test_a_request_waits_for_a_target_that_comes_back() -> None:
    a = Backend("a")
    async with before(a) as client:
        await a.stop()
        asked = asyncio.create_task(client.ask())
        await until(lambda: client.target(a).why_not is not None)
        await a.start()
        assert (await asked).words == a.words


@in_loop
async def test_a_target_that_does_not_accept_is_unreachable_and_has_not_died_of_the_request() -> None:
    b = Backend("b")
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        waiting = [socket.socket() for _ in range(3)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        async with backends(b), gateway_at(url, b.url, connect_s=0.3, probe_s=5.0, waits=False) as client:
            state = client.gateway.state
            await until(lambda: state.targets[b.id].takes_requests)
            state.targets[url[7:]].is_ready({"tiny": {}})
            outcome = await client.ask()
            assert moved(outcome, b)
            assert state.targets[url[7:]].why_not == "cannot be reached"
        for one in waiting:
            one.close()


# Clients.


@BOTH
@in_loop
async def test_a_client_that_hangs_up_ends_the_request_at_the_target(stream: bool) -> None:
    async def begin(exchange: Exchange) -> None:
        if stream:
            await part_of_stream(None)(exchange)
        await exchange.until_gone()

    a = Backend("a", [begin])
    async with before(a) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.gateway.port)
        writer.write(request_bytes("POST", CHAT, body_for(CHAT, stream)))
        if stream:
            await reader.readuntil(b"a0")
        else:
            await until(lambda: bool(a.asked))
        writer.close()
        await asyncio.wait_for(a.left.wait(), 10)
        assert client.target(a).breaker.failures == 0


async def floods(exchange: Exchange) -> None:
    """A stream without end."""
    await exchange.begin()
    while True:
        await exchange.pieces(exchange.stream[1] * 1000)


@in_loop
async def test_a_client_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.http.gateway.passing.WRITE_TIMEOUT_S", 0.3)
    a = Backend("a", [floods])
    async with before(a) as client:
        _, writer = await asyncio.open_connection("127.0.0.1", client.gateway.port, limit=1024)
        writer.write(request_bytes("POST", CHAT, body_for(CHAT, True)))
        await asyncio.wait_for(a.left.wait(), 20)
        await until(lambda: not client.gateway.connections.open)
        assert client.target(a).breaker.failures == 0, "it was not its fault"
        writer.close()


@pytest.mark.parametrize("whole", [True, False])
@in_loop
async def test_a_client_that_does_not_read_the_end_is_cut_off_and_the_gateway_goes_on(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(response: DeferredHeaders, data: bytes = b"") -> None:
        await asyncio.sleep(FOREVER_S)

    monkeypatch.setattr("engine.http.gateway.passing.WRITE_TIMEOUT_S", 0.5)
    a = Backend("a", [healthy if whole else part_of_stream(Exchange.cut)])
    async with before(a, silence_s=0.1) as client:
        with monkeypatch.context() as patch:
            patch.setattr(DeferredHeaders, "write_eof", never)
            reply = await client.raw(request_bytes("POST", CHAT, body_for(CHAT, True)))
        assert not reply.endswith(b"0\r\n\r\n") and not client.gateway.connections.open
        assert client.gateway.state.admission.in_flight == 0
        probes = len(a.probed)
        await until(lambda: len(a.probed) > probes + 2)
        assert (await client.ask()).words == a.words


@in_loop
async def test_large_requests_that_have_begun_keep_no_others_out() -> None:
    async def begins(exchange: Exchange) -> None:
        await part_of_stream(None)(exchange)
        await exchange.until_gone()

    a = Backend("a", then=begins)
    async with before(a, server={"max_body_bytes": 100_000}) as client:
        body = request_bytes("POST", CHAT, body_for(CHAT, True, messages=["x" * 99_000]))
        writers = []
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", client.gateway.port)
            writer.write(body)
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
            await reader.readuntil(b"a0")
            writers.append(writer)
        assert client.gateway.state.bodies.taken == 0
        for writer in writers:
            writer.close()
