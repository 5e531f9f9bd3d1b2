"""Every kind of template gets the content of messages as it takes it, and shows what transformers shows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.service.chat_template import ChatTemplate, TemplateRefused, TemplateSource
from engine.service.turns import PlainConversation

TEXT = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
"""Prints a list as it is."""
TEXT_OR_NOTHING = "{% for m in messages %}<{{ m.role }}>{{ m.content if m.content is string else '' }}</>{% endfor %}"
CONCATENATES = "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '</>' }}{% endfor %}"
PARTS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}</>{% endfor %}"
)
BOTH = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}</>"
    "{% endfor %}"
)
FIRST_PART_OF_SYSTEM = (
    "{% if messages[0].role == 'system' %}{% set c = messages[0].content %}"
    "<system>{{ c if c is string else c[0].text }}</>{% set messages = messages[1:] %}{% endif %}" + BOTH
)
ALTERNATES = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('must alternate') }}{% endif %}{% endfor %}" + PARTS
)
NEEDS_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + PARTS
ALL = [TEXT, TEXT_OR_NOTHING, CONCATENATES, PARTS, BOTH, FIRST_PART_OF_SYSTEM]
NAMES = ["text", "text or nothing", "concatenates", "parts", "both", "first part of system"]
TAKE_PARTS = [PARTS, BOTH]


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def conversation(*said: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in said]


def render(template: str, messages: list[dict[str, Any]]) -> str:
    return ChatTemplate(TemplateSource(template, {})).render(PlainConversation(messages))


def of_transformers(template: str, messages: list[dict[str, Any]]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    (prompts, _) = render_jinja_template(conversations=[messages], chat_template=template, add_generation_prompt=True)
    return str(prompts[0])


@pytest.mark.parametrize("template", ALL, ids=NAMES)
def test_text_reaches_every_kind_of_template(template: str) -> None:
    messages = conversation(("system", "s"), ("user", "a\nb"), ("assistant", "c"), ("user", "d"))
    assert render(template, messages) == "<system>s</><user>a\nb</><assistant>c</><user>d</>"
    if template is not PARTS:  # in which transformers shows nothing of a text
        assert of_transformers(template, messages) == render(template, messages)


@pytest.mark.parametrize("template", ALL, ids=NAMES)
def test_parts_reach_every_kind_of_template_in_every_role(template: str) -> None:
    said = [("system", [part("s"), part("t")]), ("user", [part("a\nb"), part("c")]), ("assistant", [part("d")])]
    messages = conversation(*said, ("user", "plain"))
    shown = render(template, messages)
    between = "" if template in TAKE_PARTS else "\n"
    of_users = "" if template in (*TAKE_PARTS, FIRST_PART_OF_SYSTEM) else "\n"
    assert shown == f"<system>s{between}t</><user>a\nb{of_users}c</><assistant>d</><user>plain</>"


@pytest.mark.parametrize("template", TAKE_PARTS, ids=["parts", "both"])
def test_a_template_that_takes_parts_joins_them_as_transformers_has_it(template: str) -> None:
    messages = conversation(("system", [part("s"), part(" t")]), ("user", [part("a "), part("b")]))
    assert render(template, messages) == of_transformers(template, messages) == "<system>s t</><user>a b</>"


@pytest.mark.parametrize("template", [ALTERNATES, NEEDS_SYSTEM], ids=["alternates", "needs system"])
def test_a_template_that_refuses_most_conversations_is_tried_with_others(template: str) -> None:
    first = [("system", "s")] if template is NEEDS_SYSTEM else []
    messages = conversation(*first, ("user", "a"), ("assistant", "b"), ("user", [part("c"), part("d")]))
    assert render(template, messages).endswith("<user>a</><assistant>b</><user>cd</>")


def test_a_template_that_writes_json_gets_what_was_sent() -> None:
    template = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
    for content in ("a\nb", [part("a"), part("b")]):
        messages = conversation(("user", content))
        assert render(template, messages) == of_transformers(template, messages) == json.dumps(content)


def test_text_that_a_template_leaves_out_is_an_error() -> None:
    template = "{% for m in messages %}{{ m.content.words }}{% endfor %}."
    for content in ("a", [part("a")]):
        with pytest.raises(TemplateRefused, match="leaves out what users say"):
            render(template, conversation(("user", content)))


@pytest.mark.parametrize("template", ALL, ids=NAMES)
@pytest.mark.parametrize("other", [{"type": "image"}, {"type": "text"}, "a"], ids=["image", "no text", "string"])
def test_a_part_that_is_no_text_is_refused_whatever_the_template_does_with_it(template: str, other: Any) -> None:
    with pytest.raises(TemplateRefused, match="is no text"):
        render(template, conversation(("user", [part("a"), other])))


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_the_names_that_templates_read(name: str) -> None:
    template = "{% for m in messages %}{{ m.content }}[{{ m.reasoning_content }}|{{ m.thinking }}]{% endfor %}"
    messages = [*conversation(("user", "a")), {"role": "assistant", "content": "b", name: "why"}]
    assert render(template, messages) == of_transformers(template, messages) == "a[|]b[why|why]"
