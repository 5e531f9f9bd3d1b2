"""Requests of kinds that broke other servers: what a request may name, dress up, repeat or make up."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import re
from typing import Any

import pytest

from engine.contracts.request import EngineRequest
from engine.service import keys
from engine.testing.context import build_context
from engine_plugins.exporter.config import PrometheusConfig
from engine_plugins.exporter.prometheus import PrometheusExporter

from ..service.fakes import END, ids, in_loop, make_tokenizer
from .fakes import chat, completion, running

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

NAMES_CODE = (
    "chat_template", "template", "tokenizer", "revision", "code_revision", "trust_remote_code", "processor", "engine",
    "logits_processors", "custom_logit_processor", "custom_params", "plugins", "router", "drafter", "backend",
    "guided_decoding_backend", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
    "regex", "ebnf", "json_schema", "grammar", "lora_path", "lora_request", "adapter", "model_path", "hf_overrides",
    "mm_processor_kwargs", "mm_hashes", "media_io_kwargs", "prompt_embeds", "input_embeds", "image_data", "audio_data",
    "file_url", "documents", "tools_in_user_message", "kv_transfer_params", "rid", "request_id", "bootstrap_host",
    "id_slot", "n_discard", "thinking_budget", "allowed_token_ids", "bad_words", "prompt_logprobs",
    "logprob_token_ids", "vllm_xargs", "reasoning", "session_params", "background", "conversation",
)  # fmt: skip
"""Fields by which requests choose code, files, machines or what is another request's, elsewhere."""


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@in_loop
async def test_a_request_names_no_code_file_or_machine(path: str) -> None:
    body = chat() if path == CHAT else completion()
    nested: list[dict[str, Any]] = [
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"stream_options": {"template": "x"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}},
        {"response_format": {"type": "grammar", "regex": "(a+)+b"}},
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"pattern": "(a+)+b"}}}]},
    ]
    parts = [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "input_audio", "input_audio": {"data": ""}},
        {"type": "video_url", "video_url": {"url": "http://x\\@y/"}},
        {"type": "file", "file": {"file_id": "../../x"}},
    ]
    if path == CHAT:
        nested += [{"messages": [{"role": "user", "content": [part]}]} for part in parts]
        nested += [{"messages": [{"role": "user", "content": "x", "template": "x"}]}]
    async with running() as server:
        for fields in (*({name: {"x": 1}} for name in NAMES_CODE), *nested):
            status, _, data = await server.post(path, body | fields)
            assert status == 400 and json.loads(data)["error"]["param"], fields
        assert server.client.requests == []


@pytest.mark.parametrize(
    ("path", "body", "known"),
    [
        ("/v1/responses", {"input": "hi"}, {"reasoning"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}, set()),
    ],
)
@in_loop
async def test_neither_does_one_of_another_api(path: str, body: dict[str, Any], known: set[str]) -> None:
    image = {
        "type": "input_image",
        "image_url": "http://169.254.169.254/",
        "source": {"type": "url", "url": "file:///"},
    }
    hosted = {"type": "mcp", "name": "x", "server_url": "http://169.254.169.254/"}
    nested: list[dict[str, Any]] = [
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"input" if path.endswith("responses") else "messages": [{"role": "user", "content": [image]}]},
        {"mcp_servers": [{"url": "http://169.254.169.254/"}]},
        {"tool_choice": {"type": "mcp", "server_label": "x"}, "tools": [hosted]},
    ]
    async with running() as server:
        for fields in (*({name: {"x": 1}} for name in NAMES_CODE if name not in known), *nested):
            status, _, data = await server.post(path, body | fields)
            assert status == 400 and json.loads(data)["error"]["message"], fields
        assert server.client.requests == []
        status, _, _ = await server.post(path, body | {"tools": [hosted]})
        assert status == 200, "a tool of another service is nobody's to call"


def repeats(request: EngineRequest) -> list[tuple[int, ...]]:
    number = make_tokenizer().decode_now(request.prompt).partition("number ")[2].partition("<")[0]
    return [(token,) for token in (*ids(number), END)]


@in_loop
async def test_names_that_clients_choose_are_nobodys() -> None:
    """All of them choose the same; who goes away takes nobody along."""
    async with running(repeats) as server:

        async def one(number: int) -> None:
            body = chat(f"number {number}", user="same", cache_salt="same", seed=1)
            _, headers, data = await server.post(CHAT, body, "X-Request-Id: same")
            assert headers["x-request-id"] == "same"
            assert json.loads(data)["choices"][0]["message"]["content"] == str(number)

        server.client.hold_before = 1
        tasks = [asyncio.create_task(one(number)) for number in range(40)]
        while len(server.client.requests) < 40:
            await asyncio.sleep(0.01)
        tasks[7].cancel()
        await server.client.abort_seen.wait()
        server.client.proceeding.set()
        await asyncio.gather(*tasks[:7], *tasks[8:])
        names = [request.request_id for request in server.client.requests]
        assert len(set(names)) == 40 and not any("same" in name for name in names)
        assert len(server.client.aborted) == 1


@in_loop
async def test_any_salt_is_a_salt_up_to_its_length() -> None:
    salts = ["", "\0", "a\r\nb", "\u2028", "\U0001f600" * 256, "\x1b[31m", "x" * 256, "..", "\ud7ff"]
    async with running() as server:
        for salt in salts:
            assert (await server.post(CHAT, chat(cache_salt=salt)))[0] == 200, salt
        assert [request.cache_salt for request in server.client.requests] == salts
        for wrong in (b'"' + b"x" * 257 + b'"', b'"\\ud800"', b"1", b"[]", b"{}"):
            body = json.dumps(chat()).encode()[:-1] + b', "cache_salt": ' + wrong + b"}"
            status, _, _ = await server.post(CHAT, body)
            assert status == 400, wrong


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@in_loop
async def test_a_null_limit_is_no_way_around_the_least_length(path: str) -> None:
    async with running() as server:
        body = chat(max_completion_tokens=None) if path == CHAT else completion()
        status, _, data = await server.post(path, body | {"max_tokens": None, "min_tokens": 300})
        assert status == 400 and json.loads(data)["error"]["param"] == "min_tokens"
        assert server.client.requests == []


HOSTS = (
    "localhost", "x/health?", "x/ready", "localhost/health", "x:1/health#", "user@localhost", "/health", "x\\health",
)  # fmt: skip
TARGETS = (
    "/v1/models", "//v1/models", "/v1//models", "/./v1/models", "/health/../v1/models", "/%2e/v1/models", "/v1/models?",
    "/v1/models;/health", "/v1/models#/health", "/v1/models?/health", "/V1/models", "/v1/models/", "/v1%2fmodels",
    "/health/%2e%2e/v1/models", "http://localhost/v1/models", "http://x/health?/../v1/models", "/ready/../engine/plan",
    "/v1/models/%2e%2e/%2e%2e/health", "/v1/models/../../health", "/metrics", "/engine/stats?x=/health",
)  # fmt: skip
SPOOFED = (
    "X: 1", "X-Forwarded-Host: x/health", "X-Original-URL: /health", "X-Rewrite-URL: /health",
    "X-HTTP-Method-Override: GET",
)  # fmt: skip


@in_loop
async def test_nothing_that_is_dressed_up_as_a_probe_gets_past_the_key() -> None:
    async with running(api_key="hush") as server:
        tried = [*itertools.product(HOSTS, TARGETS, SPOOFED[:1]), *itertools.product(HOSTS[:1], TARGETS, SPOOFED)]
        for (host, target, header), version in itertools.product(tried, ("1.1", "1.0")):
            lines = f"GET {target} HTTP/{version}", f"Host: {host}", header, "Connection: close"
            reply = await server.raw("\r\n".join(lines).encode() + b"\r\n\r\n")
            # What is a probe indeed is answered as one.
            assert reply.split()[1] in (b"400", b"401") or reply.endswith(b'{"status":"ok","engine":"ready"}'), lines


@in_loop
async def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[tuple[int, int]] = []

    def compare(sent: bytes, key: bytes) -> bool:
        lengths.append((len(sent), len(key)))
        return hmac.compare_digest(sent, key)

    monkeypatch.setattr(keys, "hmac", type("Spy", (), {"compare_digest": staticmethod(compare)}))
    async with running(api_key="hush") as server:
        for key in ("", "h", "hush", "hushh", "x" * 1000):
            status, _, _ = await server.get("/v1/models", f"Authorization: Bearer {key}")
            assert status == (200 if key == "hush" else 401)
    assert lengths == [(32, 32)] * 5


@in_loop
async def test_what_clients_make_up_adds_no_series() -> None:
    page = PrometheusExporter(PrometheusConfig(), build_context())

    async with running() as server:
        state = server.server.state
        page.watch(state.engine.counters.readings)

        def series() -> set[str]:
            return set(re.findall(r"^(\w+(?:\{[^}]*\})?) ", state.bus.settled(page.render), re.MULTILINE))

        await server.post(CHAT, chat())
        await server.post(CHAT, chat(temperature=9))
        await server.post(CHAT, chat(model="another"))
        before = series()
        for i in range(100):
            made_up = f"x{i}"
            await server.post(CHAT, chat(user=made_up, cache_salt=made_up), f"X-Request-Id: {made_up}")
            await server.post(CHAT, chat(model=made_up))
            await server.post(f"/{made_up}", chat())
            await server.post(CHAT, chat(), method=f"M{i}")
        assert len(before) > 20 and series() == before
