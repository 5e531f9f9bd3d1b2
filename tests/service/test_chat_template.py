from __future__ import annotations

from typing import Any

import pytest

from engine.service.chat_template import ChatTemplate, TemplateFailed, TemplateRefused, TemplateSource
from engine.service.turns import Conversation, FunctionCall, ToolCall, Turn

CONVERSATION = Conversation((Turn("user", "x"),)).plain()


CALLS = (
    "{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}"
    "{% for text in documents %}({{ text.title }}){% endfor %}"
    "{% for m in messages %}<{{ m.role }}{{ ' ' ~ m.tool_call_id if m.tool_call_id }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.id }}:{{ call.type }}:{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}{{ mood }}"
)


def render(source: str) -> str:
    return ChatTemplate(TemplateSource(source, {})).render(CONVERSATION)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id') }}",
        "{{ lipsum|attr('__globals__') }}",
        "{{ namespace|attr('__ini' ~ 't__')|attr('__globals__') }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
        "{{ '{m.__class__.__mro__}'.format_map({'m': messages}) }}",
        "{{ ['{0.__class__}', 'x']|map('format', cycler)|first }}",
        "{{ raise_exception.__code__.co_consts }}",
        "{% macro m() %}{% endmacro %}{{ m.__func__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_reaches_nothing_of_python(source: str) -> None:
    try:
        shown = render(source)
    except TemplateRefused:
        return
    assert shown in ("", "{0.__class__}")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused this conversation: roles must alternate"),
        ("{{ messages[7].content }}", "refused this conversation: list object has no element 7"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "could not handle this conversation"),
        ("{{ 1 / 0 }}", "could not handle this conversation"),
    ],
)
def test_what_a_template_raises_is_one_sentence(source: str, words: str) -> None:
    with pytest.raises(TemplateRefused, match=words):
        render(source)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", "Expected an expression"),
        ("{{ " + "(" * 6000 + "1" + ")" * 6000 + " }}", "RecursionError"),
        ("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, "SyntaxError"),
    ],
)
def test_what_does_not_compile_is_one_sentence(source: str, words: str) -> None:
    with pytest.raises(TemplateFailed, match=f"chat template does not compile: {words}"):
        render(source)


def test_a_prompt_far_longer_than_its_messages_is_cut_off() -> None:
    with pytest.raises(TemplateFailed, match="made too much of this conversation"):
        render("{% for i in range(90000) %}{{ 'x' * 32 }}{% endfor %}")


def test_templates_have_the_usual_helpers() -> None:
    said = "{% for m in messages %}{{ m.content }}{% endfor %}"
    source = said + "{% generation %}{{ {'a': '<é>'} | tojson }}{% endgeneration %}{{ strftime_now('%%') }}"
    assert render(source) == 'x{"a": "<é>"}%'


def test_tools_documents_calls_and_their_results_reach_the_template_as_json() -> None:
    call = ToolCall("call_1", FunctionCall("look", {"at": "the sea"}))
    turns = (Turn("user", "?"), Turn("assistant", "", tool_calls=[call]), Turn("tool", "blue", tool_call_id="call_1"))
    asked = Conversation(
        turns,
        variables={"mood": "calm"},
        tools=({"type": "function", "function": {"name": "look"}},),
        documents=({"title": "Seas"},),
    )
    shown = ChatTemplate(TemplateSource(CALLS, {})).render(asked.plain())
    assert shown == '[look](Seas)<user>?<assistant>call_1:function:look{"at": "the sea"}<tool call_1>bluecalm'


def test_without_tools_and_documents_a_template_finds_none() -> None:
    said = "{{ tools is none }}{{ documents is none }}{{ messages[0].tool_calls is defined }}{{ messages[0].content }}"
    assert render(said) == "TrueTrueFalsex"


def test_arguments_of_calls_reach_templates_as_they_take_them() -> None:
    call = ToolCall("1", FunctionCall("add", {"a": 1}))
    asked = Conversation((Turn("user", "x"), Turn("assistant", "", tool_calls=[call]))).plain()
    each = (
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ BODY }}{% endfor %}{% endfor %}"
    )
    as_object = each.replace("BODY", "call.function.arguments.a + 1")
    as_text = each.replace("BODY", "'=' + call.function.arguments")
    neither = each.replace("BODY", "1 / 0")
    assert ChatTemplate(TemplateSource(as_object, {})).render(asked) == "x2"
    assert ChatTemplate(TemplateSource(as_text, {})).render(asked) == 'x={"a": 1}'
    with pytest.raises(TemplateRefused):
        ChatTemplate(TemplateSource(neither, {})).render(asked)


def test_a_template_that_leaves_tools_out_refuses_them() -> None:
    tools = ({"type": "function", "function": {"name": "add"}},)
    asked = Conversation((Turn("user", "x"),), tools=tools).plain()
    said = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(TemplateRefused, match="leaves out tools: 'add'"):
        ChatTemplate(TemplateSource(said, {})).render(asked)
    assert "add" in ChatTemplate(TemplateSource(said + "{{ tools | tojson }}", {})).render(asked)


ALTERNATING = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{{ messages[0].content }}|{% else %}"
    "{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
)


def test_what_the_system_says_later_is_the_users_where_a_template_takes_one_system() -> None:
    said: list[tuple[Any, str]] = [
        ("system", "S"),
        ("user", "a"),
        ("system", "b"),
        ("assistant", "c"),
        ("system", "d"),
        ("user", "e"),
    ]
    asked = Conversation(tuple([Turn(role, text) for role, text in said])).plain()
    assert ChatTemplate(TemplateSource(ALTERNATING, {})).render(asked) == "S|u:a\n\nb|a:c|u:d\n\ne|"
    anything = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
    assert ChatTemplate(TemplateSource(anything, {})).render(asked) == "s:S|u:a|s:b|a:c|s:d|u:e|"
    wrong = Conversation((Turn("user", "a"), Turn("user", "b"))).plain()
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        ChatTemplate(TemplateSource(ALTERNATING, {})).render(wrong)
