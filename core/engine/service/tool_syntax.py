"""How models write calls of tools, and the grammar of an output that must call one.

A model writes calls as its chat template taught it, so the template's own text tells the syntax. A new one is an entry
of :data:`SYNTAXES`; a new form is a reader in ``call_readers.py``, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from engine.checkpoint.files import CheckpointError, read_json
from engine.contracts.constraint import CallsGrammar, Grammar

_NEEDED: dict[str, tuple[str, ...]] = {
    "object": (),
    "named": ("opens", "after_name"),
    "marked": ("opens", "before_key", "after_key", "after_value", "ends"),
    "literal": ("opens", "after_name", "after_key", "ends"),
}
"""Without these texts a call cannot be told from other text, by form."""


class CallSyntax(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a call stands after ``opens``, as data: ``server.tool_syntax`` may be a file of it. By ``form``:

    * ``object``: a JSON object ``{"name": ..., ARGUMENTS: {...}}``;
    * ``named``: ``before_name`` perhaps, the name, ``after_name``, the arguments as a JSON object;
    * ``marked``: ``before_name``, the name, ``after_name``, and for each parameter its name and value between
      ``before_key``, ``after_key``, ``before_value`` and ``after_value``, then ``ends``;
    * ``literal``: ``before_name`` perhaps, the name, ``after_name``, and for each parameter its name, ``after_key`` and
      a literal, with commas between them, then ``ends``.
    """

    name: str = ""
    marker: str = ""
    """A template with this text uses the syntax."""
    opens: str = ""
    """Before each call, or with ``listed`` before all; empty: an output that begins with a call has them."""
    closes: str = ""
    """After each call."""
    form: Literal["object", "named", "marked", "literal"] = "object"
    arguments: str = "arguments"
    listed: bool = False
    """The calls are an array, or stand one after the other where that has no :attr:`brackets`."""
    brackets: bool = True
    """Whether the array has them."""
    wraps: tuple[str, ...] = ()
    """Around all calls; no text for the reader."""
    before_name: str = ""
    after_name: str = ""
    before_key: str = ""
    after_key: str = ""
    before_value: str = ""
    after_value: str = ""
    ends: str = ""
    quote: str = ""
    """Around strings without escapes, in literals."""
    once: bool = False
    """An output ends with its first call."""
    thought: tuple[str, str] = ("", "")
    """Around what an output may think before it calls or answers, where that and :attr:`answer` are messages of it."""
    answer: str = ""
    """Before an answer."""

    def __post_init__(self) -> None:
        needed = _NEEDED[self.form]
        if self.form == "literal" and self.listed and self.brackets:
            needed = needed[1:]  # an output that begins with a bracket has calls
        if missing := [name for name in needed if not getattr(self, name)]:
            raise ValueError(f"form={self.form} needs {' and '.join(missing)}")

    @property
    def takes_end(self) -> bool:
        """``ends`` is not ``closes``, which follows."""
        return self.ends != self.closes

    @property
    def texts(self) -> tuple[str, ...]:
        """Those that may be special tokens."""
        around_calls = (self.opens, self.closes, self.before_name, self.after_name, *self.wraps)
        around_values = (self.before_key, self.after_key, self.before_value, self.after_value, self.ends, self.quote)
        return tuple([text for text in (*around_calls, *around_values) if text])


_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_OTHERS = ("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "if", "$ref", "dependentSchemas")
_SPECIAL = re.compile(r"(<[|｜][^<>|｜]+[|｜]>)")
CHANNELS = CallSyntax(
    "harmony", "<|channel|>", "<|channel|>commentary to=functions.", form="named",
    after_name=" <|constrain|>json<|message|>", once=True,
    thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"), answer="<|channel|>final<|message|>",
)  # fmt: skip
"""As :mod:`engine.service.channels` passes calls on, in whose outputs everything has a header."""
SYNTAXES = (
    CHANNELS,
    CallSyntax(
        "functions", "<function=", "<tool_call>", "</tool_call>", "marked", before_name="<function=", after_name=">",
        before_key="<parameter=", after_key=">", after_value="</parameter>", ends="</function>",
    ),
    CallSyntax(
        "pairs", "<arg_key>", "<tool_call>", "</tool_call>", "marked", before_key="<arg_key>", after_key="</arg_key>",
        before_value="<arg_value>", after_value="</arg_value>", ends="</tool_call>",
    ),
    CallSyntax(
        "fenced", "```json", "<｜tool▁call▁begin｜>", "```<｜tool▁call▁end｜>", "named", wraps=_CALLS,
        before_name="function<｜tool▁sep｜>", after_name="\n```json\n",
    ),
    CallSyntax(
        "separated", "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "named", wraps=_CALLS,
        after_name="<｜tool▁sep｜>",
    ),
    CallSyntax(
        "sections", "<|tool_call_argument_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>", "named", wraps=_SECTION,
        before_name="functions.", after_name="<|tool_call_argument_begin|>",
    ),
    CallSyntax(
        "lines", "<function_calls>", "<function_calls>", "</function_calls>", "literal", listed=True, brackets=False,
        after_name="(", after_key="=", ends=")",
    ),
    CallSyntax(
        "quoted", "<|tool_call>call:", "<|tool_call>", "<tool_call|>", "literal", before_name="call:", after_name="{",
        after_key=":", ends="}", quote='<|"|>',
    ),
    CallSyntax(
        "escaped", "<start_function_call>", "<start_function_call>", "<end_function_call>", "literal",
        before_name="call:", after_name="{", after_key=":", ends="}", quote="<escape>",
    ),
    CallSyntax("tagged", "<tool_call>", "<tool_call>", "</tool_call>"),
    CallSyntax("named", "[ARGS]", "[TOOL_CALLS]", form="named", after_name="[ARGS]"),
    CallSyntax("listed", "[TOOL_CALLS]", "[TOOL_CALLS]", listed=True),
    CallSyntax("token_listed", "<|tool_call|>", "<|tool_call|>", listed=True),
    CallSyntax(
        "pythonic", "[func_name1(", form="literal", listed=True, wraps=("<|python_start|>", "<|python_end|>"),
        after_name="(", after_key="=", ends=")",
    ),
    CallSyntax("bare", '"parameters"', arguments="parameters"),
)  # fmt: skip
"""Looked for in this order; which models use which, docs/serving.md says."""


@lru_cache(8)
def syntax_of(template: str) -> CallSyntax | None:
    """The syntax that a chat template teaches; ``None``: none of these."""
    return next((syntax for syntax in SYNTAXES if syntax.marker in template), None)


def told_syntax(told: str) -> CallSyntax:
    """One of :data:`SYNTAXES` by its name, or that of a file. Raises ``ValueError`` saying what is wrong."""
    if named := next((syntax for syntax in SYNTAXES if syntax.name == told), None):
        return named
    if not told.endswith(".json"):
        names = ", ".join(sorted(syntax.name for syntax in SYNTAXES))
        raise ValueError(f"no syntax of calls has this name; expected one of {names}, or a file that ends in .json")
    try:
        return msgspec.convert(read_json(Path(told)), CallSyntax)
    except (CheckpointError, msgspec.ValidationError) as error:
        raise ValueError(str(error)) from None


def call_grammar(
    syntax: CallSyntax,
    functions: Sequence[Mapping[str, Any]],
    special_ids: Mapping[str, int],
    *,
    several: bool = True,
    otherwise: dict[str, Any] | None = None,
    in_text: bool = False,
) -> Grammar:
    """Of outputs that call one of ``functions`` (``name``, ``parameters``), or ``several`` times any of them.
    ``otherwise``: a schema of outputs that need not; ``in_text``: they are any text, which may stand around calls, too.
    ``special_ids``: special tokens by their text."""
    is_free = syntax.form in ("marked", "literal")
    opens, before = _pieces(syntax.opens, special_ids), _pieces(syntax.before_name, special_ids)
    after = _pieces(syntax.after_name, special_ids)
    if is_free and syntax.listed and syntax.brackets:
        before = ("[", *before)
    if is_apart := len(opens) > 1:
        before = (*opens, *before)
    thought, ends_thought = [_pieces(text, special_ids) for text in syntax.thought]
    can_think = all(not isinstance(piece, str) for piece in ends_thought[:1])
    calls = CallsGrammar(
        schemas=tuple([_call_schema(syntax, function) for function in functions]),
        begins=tuple([(*before, str(function["name"]), *after) for function in functions])
        if syntax.form != "object"
        else (),
        is_free=is_free,
        free_tokens=tuple([special_ids[text] for text in syntax.texts if text in special_ids]) if is_free else (),
        opens="" if is_apart else syntax.opens,
        opens_token=special_ids.get(syntax.opens),
        closes=syntax.closes,
        closes_token=special_ids.get(syntax.closes),
        listed=syntax.listed and not is_free,
        several=several and bool(syntax.opens) and not syntax.once,
        otherwise=otherwise,
        answer=_pieces(syntax.answer, special_ids),
        thought=thought if can_think else (),
        ends_thought=ends_thought if can_think else (),
        in_text=in_text,
        text_tokens=tuple([special_ids[text] for text in syntax.wraps if text in special_ids]) if in_text else (),
    )
    return Grammar("calls", msgspec.json.encode(calls).decode())


def _pieces(text: str, special_ids: Mapping[str, int]) -> tuple[str | int, ...]:
    """A text with the special tokens in it by id."""
    found = [text] if text in special_ids else _SPECIAL.split(text)
    return tuple([special_ids.get(piece, piece) for piece in found if piece])


def _call_schema(syntax: CallSyntax, function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = _closed(function.get("parameters") or {"type": "object"})
    if syntax.form != "object":
        return parameters
    parameters = _within(parameters, f"#/properties/{syntax.arguments}")
    properties = {"name": {"const": function["name"]}, syntax.arguments: parameters}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _closed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A function takes no other arguments than those that it names, unless its schema says something of others."""
    names_some = "properties" in parameters and not any(key in parameters for key in _OTHERS)
    return {**parameters, **({"additionalProperties": False} if names_some else {})}


def _within(schema: Any, place: str) -> Any:
    """A schema with its own references as they are where it stands at ``place`` of another one. Those by an anchor or
    an ``$id`` stay what they are, and so do all of a part that has an ``$id``: they are of that part."""
    if isinstance(schema, list):
        return [_within(each, place) for each in schema]
    if not isinstance(schema, Mapping) or not str(schema.get("$id", "#")).startswith("#"):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            found[key] = place + value[1:]
        elif key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, Mapping):
            found[key] = {name: _within(each, place) for name, each in value.items()}
        else:
            found[key] = value if key in ("const", "enum", "default", "examples") else _within(value, place)
    return found
