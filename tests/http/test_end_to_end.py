"""The product as a newcomer meets it: ``engine serve +preset=latency`` and the official OpenAI client."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.clients.cases import openai_cases, outcome

from engine.service.timings import SPANS

QUESTION = [{"role": "user", "content": "What does json.dumps do?"}]
ANSWER = "Serialize ``obj`` to a JSON formatted ``str``."


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "engine.cli.main", "serve", "+preset=latency", f"server.port={port}", "device=cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    base = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, process.stdout.read().decode() if process.stdout else ""
            try:
                get(f"{base}/ready")
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)  # polling a child process, bounded
        yield base
    finally:
        process.terminate()
        assert process.wait(30) == 0


@pytest.fixture(scope="module")
def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


def test_the_openai_client_streams_the_docstring_of_json_dumps(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="bundled",
        messages=QUESTION,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=80,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, reasons, usages = "", [], []
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
        usages += [chunk.usage] if chunk.usage else []
    assert text.startswith(ANSWER)
    assert reasons == ["stop"]
    (usage,) = usages
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 20


def test_two_choices_with_logprobs_differ_and_add_up(client: OpenAI) -> None:
    done = client.chat.completions.create(
        model="bundled",
        messages=[{"role": "user", "content": "Hello there"}],
        n=2,
        temperature=1.5,
        seed=7,
        max_tokens=12,
        logprobs=True,
        top_logprobs=3,
        extra_body={"ignore_eos": True},
    )
    first, second = done.choices
    assert (first.index, second.index) == (0, 1)
    assert first.message.content != second.message.content
    assert done.usage is not None and done.usage.completion_tokens == 24
    for choice in done.choices:
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 12
        for entry in choice.logprobs.content:
            assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
            assert entry.top_logprobs[0].logprob >= entry.logprob - 1e-6


def test_a_repeated_prompt_reports_cached_tokens_and_timings_that_add_up(client: OpenAI) -> None:
    prompt = "def main(argv):\n    " * 20
    for _ in range(2):
        done = client.completions.create(model="bundled", prompt=prompt, max_tokens=4, temperature=0)
    assert done.usage is not None and done.usage.prompt_tokens_details is not None
    assert done.usage.prompt_tokens_details.cached_tokens >= 16
    timings = done.model_extra["timings"] if done.model_extra else {}
    spans = sum(timings[f"{name}_ms"] for name in (*SPANS, "unattributed"))
    assert spans == pytest.approx(timings["total_ms"], abs=0.01)
    assert abs(timings["unattributed_ms"]) < 0.01 * timings["total_ms"] + 0.01
    assert 0 <= timings["draft_chains"] <= timings["decode_steps"] and 0 <= timings["draft_share"] <= 1


def test_a_bad_field_is_refused_by_name(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="temperature") as refused:
        client.completions.create(model="bundled", prompt="a", temperature=3)
    assert refused.value.param == "temperature"


def test_plan_latency_and_metrics_are_served(url: str) -> None:
    plan = json.loads(get(f"{url}/engine/plan"))
    assert "drafter" in json.dumps(plan)
    assert "ttft" in get(f"{url}/engine/latency")
    metrics = get(f"{url}/metrics")
    assert "engine_" in metrics and "itl" in metrics
    stats = json.loads(get(f"{url}/engine/stats"))
    (blocks,) = stats["blocks"]
    assert blocks["group"] == "full" and blocks["free"] + blocks["cached"] + blocks["leased"] == blocks["total"]


def test_the_openai_client_gets_what_it_asks_for_or_a_refusal_it_understands(url: str) -> None:
    wrong = {name: outcome(call, refused) for name, call, refused in openai_cases(f"{url}/v1")}
    assert len(wrong) == 14 and not any(wrong.values()), wrong


DOCUMENT = "The json module encodes and decodes. " * 40
LOOKS_AHEAD = 1
"""Tokens at the end of a hit that the preset's drafter has computed from others, and computes again."""


def post(url: str, path: str, body: object) -> dict[str, Any]:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        found: dict[str, Any] = json.loads(response.read())
        return found


def shared_tokens(url: str, *conversations: list[dict[str, Any]]) -> int:
    """Counted anew: tokens that their prompts have in common."""
    one, other = (post(url, "/tokenize", {"messages": messages})["tokens"] for messages in conversations)
    return next(at for at, (mine, its) in enumerate(zip(one, other, strict=False)) if mine != its)


def test_the_anthropic_client_is_told_what_was_written_to_the_cache_and_read_from_it(url: str) -> None:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="unused", max_retries=0)
    intro, hour = "You answer about a document.", {"type": "ephemeral", "ttl": "1h"}
    system: Any = [
        {"type": "text", "text": intro, "cache_control": hour},
        {"type": "text", "text": DOCUMENT, "cache_control": {"type": "ephemeral"}},
    ]

    def asked(question: str) -> Any:
        messages: Any = [{"role": "user", "content": question}]
        return client.messages.create(model="bundled", max_tokens=4, system=system, messages=messages)

    def told(*says: str, question: str) -> list[dict[str, Any]]:
        return [{"role": "system", "content": "\n\n".join(says)}, {"role": "user", "content": question}]

    first, second = "What is it about?", "Name its topics."
    both = shared_tokens(url, told(intro, DOCUMENT, question=first), told(intro, DOCUMENT, question=second))
    one = shared_tokens(url, told(intro, DOCUMENT, question=first), told(intro + "?", question=first))
    counted = client.messages.count_tokens(
        model="bundled", system=system, messages=[{"role": "user", "content": first}]
    ).input_tokens

    usage = asked(first).usage
    before = usage.cache_read_input_tokens or 0  # of a beginning that all prompts have
    assert before < 16 and before + (usage.cache_creation_input_tokens or 0) == both
    assert usage.cache_creation is not None and usage.input_tokens + both == counted
    assert usage.cache_creation.ephemeral_1h_input_tokens == one - before
    assert usage.cache_creation.ephemeral_5m_input_tokens == both - one
    usage = asked(second).usage
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (both - LOOKS_AHEAD, LOOKS_AHEAD)

    longer: Any = [{"role": "user", "content": second}, {"role": "assistant", "content": "Encoding."}]
    longer += [{"role": "user", "content": [{"type": "text", "text": "And " + DOCUMENT[:200]}]}]
    ask: dict[str, Any] = {"model": "bundled", "max_tokens": 4, "system": system, "messages": longer}
    automatic: Any = {"cache_control": {"type": "ephemeral"}}
    with client.messages.stream(**ask, **automatic) as stream:
        usage = stream.get_final_message().usage
    whole = client.messages.count_tokens(model="bundled", system=system, messages=longer).input_tokens
    read, new = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
    assert read >= both - LOOKS_AHEAD and new > 0 and usage.input_tokens + read + new == whole
    assert usage.cache_creation is not None and usage.cache_creation.ephemeral_5m_input_tokens == new


def test_the_openai_client_is_told_the_same_of_its_breakpoints(url: str, client: OpenAI) -> None:
    document = {"type": "text", "text": "Now: " + DOCUMENT}
    marked = document | {"prompt_cache_breakpoint": {"mode": "explicit"}}

    def conversation(part: dict[str, Any], question: str) -> Any:
        return [{"role": "user", "content": [part, {"type": "text", "text": question}]}]

    found = []
    for question in ("What is it about?", "Name its topics."):
        done = client.chat.completions.create(
            model="bundled", messages=conversation(marked, question), max_tokens=4,
            prompt_cache_options={"mode": "explicit", "ttl": "30m"}, prompt_cache_key="k",
        )  # fmt: skip
        assert done.usage is not None and done.usage.prompt_tokens_details is not None
        details = done.usage.prompt_tokens_details
        found.append((details.cached_tokens or 0, details.cache_write_tokens or 0))
    both = shared_tokens(url, conversation(document, "What is it about?"), conversation(document, "Name its topics."))
    (read, new), (again, anew) = found
    assert read + new == both and (again, anew) == (both - LOOKS_AHEAD, LOOKS_AHEAD) and new > 200
