from __future__ import annotations

import json
import time
from typing import Any

import pytest

from engine.contracts.config import SlotConfig
from engine.contracts.router import ModelChoice, ModelRequest, ModelView
from engine.testing.context import build_context
from engine.testing.router import RouterConformance
from engine_plugins.router import tiered
from engine_plugins.router.tiered import (
    MOST_BEGINNING_BYTES,
    MOST_READ_BYTES,
    MOST_TURNS,
    TieredConfig,
    TieredRouter,
    beginning,
)

TWO = (ModelView("small", True), ModelView("large", True))
THREE = (ModelView("small", True), ModelView("medium", True), ModelView("large", True))
HI = {"role": "user", "content": "hi"}


def make(**settings: int) -> TieredRouter:
    return TieredRouter(TieredConfig(**settings), build_context())


class TestConformance(RouterConformance):
    def make(self) -> TieredRouter:
        return make()


def chosen(*turns: Any, **given: Any) -> tuple[str, ...]:
    return choice(*turns, **given).models


def choice(*turns: Any, models: tuple[ModelView, ...] = TWO, tools: Any = None, **fields: Any) -> ModelChoice:
    """For a chat; a turn that is a text is the user's."""
    messages = [{"role": "user", "content": turn} if isinstance(turn, str) else turn for turn in turns]
    prompt = {"messages": json.dumps(messages).encode()}
    prompt |= {} if tools is None else {"tools": json.dumps(tools).encode()}
    return make().choose(ModelRequest("r", "chat", "auto", prompt, fields), models)


def first(*turns: Any, **given: Any) -> str:
    return chosen(*turns, **given)[0]


@pytest.mark.parametrize(
    "text",
    [
        "What is the capital of France?",
        "Summarise: the meeting is on 3 May; bring a pen.",
        "Ist das (wirklich) gut? 50 % sagen ja, 20 nein.",
        "I was born in 1999. Tell me a story about a class of pupils.",
        "Explain HTTP/2 and TCP/IP in two sentences.",
    ],
)
def test_short_questions_are_simple(text: str) -> None:
    assert first(text) == "small"


@pytest.mark.parametrize(
    "text",
    [
        "```\nx\n```",
        "def f(x):\n    return x",
        "What does this do?\n  for (;;) { x(); }",
        "import numpy as np; print(np.pi)",
        "SELECT name FROM users WHERE id",
        "<div>hello</div>",
        "const f = (x) => x",
        "What is 17 * 23?",
        "Solve x = 2y for y.",
        "Show that $a^2$ is positive.",
        "Compute \\frac{1}{2}.",
        "Prove that there are infinitely many primes.",
    ],
)
def test_code_and_maths_are_not_simple(text: str) -> None:
    assert first(text) == "large"


@pytest.mark.parametrize(
    ("field", "asked", "model"),
    [
        ("response_format", {"type": "json_object"}, "large"),
        ("response_format", {"type": "text"}, "small"),
        ("guided_regex", "a+", "large"),
        ("tool_choice", "auto", "small"),
        ("tool_choice", "required", "large"),
        ("temperature", 0.0, "small"),
    ],
)
def test_a_shape_of_the_answer_is_not_simple(field: str, asked: Any, model: str) -> None:
    assert first("hi", **{field: asked}) == model


def test_tools_and_images_are_not_simple() -> None:
    assert first("hi", tools=[]) == "small" and first("hi", tools=[{"type": "function"}]) == "large"
    image = {"type": "image_url", "image_url": {"url": "http://h/i.png"}}
    assert first({"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}) == "large"
    assert first({"role": "user", "content": [{"type": "text", "text": "hi"}]}) == "small"


def test_length_decides_among_three() -> None:
    for words, model in ((300, "small"), (600, "medium"), (3000, "medium"), (5000, "large")):
        assert first("abc " * words, models=THREE) == model
    assert first("What is 17 * 23?", models=THREE) == "medium", "short, and not simple"
    assert first("abc " * 600) == "large"


def test_a_system_prompt_is_part_of_the_beginning() -> None:
    assert first({"role": "system", "content": "abc " * 600}, HI) == "large"


def test_a_conversation_stays_with_its_model() -> None:
    later = [{"role": "assistant", "content": "def f(x):\n  return 1 + 1"}, {"role": "user", "content": "abc " * 9000}]
    assert first(HI, *later) == "small"
    begun = {"role": "user", "content": "What is 17 * 23?"}
    assert first(begun) == first(begun, *later, HI) == "large"


def test_a_prompt_that_does_not_fit_goes_to_a_longer_model() -> None:
    later = [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "abc " * 9000}]
    short = (ModelView("small", True, max_len=4096), ModelView("large", True, max_len=32768))
    assert first(HI, models=short) == "small" and first(HI, *later, models=short) == "large"


def test_larger_models_stand_in_before_smaller_ones() -> None:
    assert chosen("hi", models=THREE) == ("small", "medium", "large")
    assert chosen("abc " * 600, models=THREE) == ("medium", "large", "small")
    assert chosen("abc " * 5000, models=THREE) == ("large", "medium", "small")


@pytest.mark.parametrize(
    "prompt", [{"prompt": "hi"}, {"input": "hi"}, {"input": [{"role": "user", "content": "hi"}]}, {"messages": 7}, {}]
)
def test_other_endpoints_are_read_too(prompt: dict[str, Any]) -> None:
    raw = {name: json.dumps(value).encode() for name, value in prompt.items()}
    assert make().choose(ModelRequest("r", "completion", "auto", raw, {}), TWO).models[0] == "small"


def test_what_is_too_much_to_read_goes_to_the_last_one_at_once() -> None:
    raw = {"messages": json.dumps([HI, {"role": "user", "content": "a" * MOST_READ_BYTES}]).encode()}
    assert make().choose(ModelRequest("r", "chat", "auto", raw, {}), TWO).models[0] == "large"


@pytest.mark.parametrize("piece", ["SELECT ", "a(", "\n", " ", ";", "; ", "$", "1 ", "<a", "def ", "x = ", "\\"])
def test_no_text_takes_long_to_look_at(piece: str) -> None:
    raw = {"messages": json.dumps([{"role": "user", "content": (piece * 10**5)[:60_000]}]).encode()}
    router = make(small_tokens=10**6, medium_tokens=10**6)
    begun_s = time.process_time()
    router.choose(ModelRequest("r", "chat", "auto", raw, {}), TWO)
    assert time.process_time() - begun_s < 2.0, "it grows faster than the text"


def test_only_the_beginning_is_read() -> None:
    brackets = b"[" + b"[]," * (MOST_BEGINNING_BYTES // 3) + b"[]]"
    user = b'{"role": "user", "content": "hi"}'
    late = b'{"role": "user", "content": ' + brackets + b"}"
    assert beginning({"messages": b"[" + user + b", " + late + b"]"}) == ["hi"]
    for prompt in ({"messages": b"[" + late + b"]"}, {"prompt": brackets}, {"tools": brackets, "messages": b"[]"}):
        raw = ModelRequest("r", "chat", "auto", prompt, {})
        assert beginning(prompt) == [] and make().choose(raw, TWO).models[0] == "large"
    turns = [{"role": "system", "content": "x"}] * MOST_TURNS
    assert beginning({"messages": json.dumps([*turns, HI]).encode()}) == ["x"] * MOST_TURNS


@pytest.mark.parametrize(
    "data", [b"{", b'{"role": "user"}', b'[{"role": 7}, 7, null, {"role": "user"}]', b"[\xff]", b""]
)
def test_what_is_no_conversation_is_read_as_far_as_it_goes(data: bytes) -> None:
    assert set(beginning({"messages": data})) <= {"user"}


def test_settings_are_in_order() -> None:
    with pytest.raises(ValueError, match=r"router\.medium_tokens=4: expected at least 5"):
        TieredConfig(small_tokens=5, medium_tokens=4)
    assert issubclass(TieredConfig, SlotConfig)


def test_the_reason_is_the_rule_that_decided() -> None:
    short = (ModelView("small", True, max_len=100), ModelView("large", True))
    assert choice("Why is the sky blue?").reason == "short and simple"
    assert choice("What is 17 * 23?").reason == "not simple"
    assert choice("word " * 4000).reason == "long"
    assert choice("word " * 1000, models=(*TWO[:1], ModelView("medium", True), *TWO[1:])).reason == "of medium length"
    assert choice("word " * 200, models=short).reason == "too long for small"


def test_no_signs_are_looked_for_where_the_length_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered, "is_simple", lambda *_: pytest.fail("looked for"))
    assert first("a(" * 4000) == "large"
