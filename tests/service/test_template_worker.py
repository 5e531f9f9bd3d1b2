from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from engine.assembly.errors import AssemblyError
from engine.service.chat_template import TemplateFailed, TemplateSource
from engine.service.start_check import load_tokenizer
from engine.service.template_worker import TemplateWorker
from engine.service.turns import Conversation, Turn
from tests.selection import few

from .fakes import TOKENIZER_JSON, in_loop, make_plan

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ON_REQUEST = "{% if messages[0].content == 'boom' %}" + LOOP + "{% endif %}{{ messages[0].content }}"
"""A program that waits for its word."""
TOO_LONG = "took more than 1 s of CPU time"
TOO_LARGE = "took more than 512 MB of memory"


def says(*contents: str) -> Conversation:
    return Conversation(tuple([Turn("user", content) for content in contents]))


@pytest.fixture
def worker() -> Iterator[Callable[[str], TemplateWorker]]:
    made: list[TemplateWorker] = []

    def make(source: str) -> TemplateWorker:
        made.append(TemplateWorker(TemplateSource(source, {})))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (LOOP, TOO_LONG),
        ("{{ 10 ** (10 ** 9) }}", "cannot be used: it " + TOO_LONG),
        ("{{ 'a' * 10 ** 9 }}", TOO_LARGE),
        ("{{ 'a'.center(10 ** 9) }}", TOO_LARGE),
        ("{{ '%1000000000d' % 1 }}", TOO_LARGE),
        ("{{ 'a' | indent(10 ** 9, true) }}", TOO_LARGE),
        ("{{ (" + "(" * 6000 + "1" + ")" * 6000 + " }}", "does not compile: RecursionError"),
        ("{{ 'a' * 10 ** 6 }}", "made too much of this conversation"),
    ],
    ids=["loop", "power", "multiply", "center", "format", "indent", "parentheses", "output"],
)
@few(1)
def test_a_template_that_breaks_a_limit_is_refused_at_start(
    worker: Callable[[str], TemplateWorker], source: str, words: str
) -> None:
    with pytest.raises(TemplateFailed, match=words):
        worker(source).check()


def test_a_template_that_refuses_a_greeting_may_take_other_conversations(
    worker: Callable[[str], TemplateWorker],
) -> None:
    made = worker("{% if messages|length < 2 %}{{ raise_exception('hello?') }}{% endif %}{{ messages[1].content }}")
    made.check()
    with pytest.raises(TemplateFailed, match=r"hello\?"):
        made.render_now(says("x"))
    assert made.render_now(says("x", "y")).text == "y"


@in_loop
async def test_a_conversation_that_breaks_a_limit_fails_alone_and_nobody_waits_for_it() -> None:
    worker = TemplateWorker(TemplateSource(ON_REQUEST, {}))
    await asyncio.to_thread(worker.check)
    guilty = asyncio.create_task(worker.render(says("boom")))
    others = await asyncio.gather(*(worker.render(says(f"number {i}")) for i in range(20)))
    assert [other.text for other in others] == [f"number {i}" for i in range(20)]
    assert not guilty.done()
    with pytest.raises(TemplateFailed, match=TOO_LONG):
        await guilty
    worker.close()


@pytest.mark.parametrize("source", ["{{ 'a' * 10 ** 9 }}", "{% for i in [1] %}" * 30 + "{% endfor %}" * 30])
def test_a_server_with_such_a_template_says_so_in_one_line(tmp_path: Path, source: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER_JSON)
    (tmp_path / "chat_template.jinja").write_text(source)
    plan = make_plan()
    with pytest.raises(AssemblyError) as refused:
        load_tokenizer(replace(plan, model=replace(plan.model, path=str(tmp_path))))
    (line,) = refused.value.problems
    assert line.startswith(f"model.path={tmp_path}: the ") and "chat template" in line and line.isprintable()


@pytest.mark.parametrize(
    "reply",
    [
        msgspec.msgpack.encode({"type": "Prompt", "text": 1}),
        msgspec.msgpack.encode({"type": "Other"}),
        msgspec.msgpack.encode("x"),
        b"\x82\xa4type\xa6Prompt\xa4text\xa1\xff",
        b"",
    ],
    ids=["number", "other", "text", "no utf-8", "nothing"],
)
def test_only_the_type_of_an_answer_is_believed(worker: Callable[[str], TemplateWorker], reply: bytes) -> None:
    with pytest.raises(TemplateFailed, match="answered what it should not"):
        worker("x")._text(reply)


def test_a_process_that_died_is_replaced_and_no_conversation_is_lost(
    worker: Callable[[str], TemplateWorker],
) -> None:
    made = worker("{{ messages[0].content }}")
    made.check()
    made.render_now(says("both are there"))
    for killed in made.pids:
        os.kill(killed, signal.SIGKILL)
        os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)
    assert made.render_now(says("still here")).text == "still here"


def test_the_words_of_a_template_are_one_printable_line(worker: Callable[[str], TemplateWorker]) -> None:
    with pytest.raises(TemplateFailed) as refused:
        worker(r"{{ raise_exception('a\nb\x1b[31m\ud800' ~ 'c' * 10000) }}").render_now(says("x"))
    assert str(refused.value).isprintable() and len(str(refused.value)) <= 300


def is_there(pid: int) -> bool:
    """Whether a process has this id; a dead one that nobody has waited for, too."""
    return Path(f"/proc/{pid}").exists()
