"""How models write calls of tools, and the grammar of an output that must call one.

A model writes calls as its chat template taught it, so the template's own text tells the syntax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from engine.contracts.constraint import CallsGrammar, Grammar


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a call stands after ``opens``. By ``form``:

    * ``object``: a JSON object ``{"name": ..., ARGUMENTS: {...}}``;
    * ``named``: ``before_name`` perhaps, the name, ``after_name``, the arguments as a JSON object;
    * ``marked``: ``before_name``, the name, ``after_name``, and for each parameter its name and value between
      ``before_key``, ``after_key``, ``before_value`` and ``after_value``, then ``ends``.
    """

    name: str
    marker: str
    """A template with this text uses the syntax."""
    opens: str = ""
    """Before each call, or with ``listed`` before all; empty: an output that begins with a call has them."""
    closes: str = ""
    """After each call."""
    form: Literal["object", "named", "marked"] = "object"
    arguments: str = "arguments"
    listed: bool = False
    """The calls are an array."""
    wraps: tuple[str, ...] = ()
    """Around all calls; no text for the reader."""
    before_name: str = ""
    after_name: str = ""
    before_key: str = ""
    after_key: str = ""
    before_value: str = ""
    after_value: str = ""
    ends: str = ""

    @property
    def takes_end(self) -> bool:
        """``ends`` is not ``closes``, which follows."""
        return self.ends != self.closes

    @property
    def texts(self) -> tuple[str, ...]:
        """Those that may be special tokens."""
        found = (self.opens, self.closes, self.before_name, self.after_name, *self.wraps)
        return tuple([text for text in found if text])


_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
SYNTAXES = (
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
    CallSyntax("tagged", "<tool_call>", "<tool_call>", "</tool_call>"),
    CallSyntax("named", "[ARGS]", "[TOOL_CALLS]", form="named", after_name="[ARGS]"),
    CallSyntax("listed", "[TOOL_CALLS]", "[TOOL_CALLS]", listed=True),
    CallSyntax("token_listed", "<|tool_call|>", "<|tool_call|>", listed=True),
    CallSyntax("bare", '"parameters"', arguments="parameters"),
)  # fmt: skip
"""Looked for in this order; which models use which, docs/serving.md says. Calls in other syntaxes are text."""


def syntax_of(template: str) -> CallSyntax | None:
    """The syntax that a chat template teaches; ``None``: none of these."""
    return next((syntax for syntax in SYNTAXES if syntax.marker in template), None)


def call_grammar(
    syntax: CallSyntax,
    functions: Sequence[Mapping[str, Any]],
    special_ids: Mapping[str, int],
    *,
    several: bool = True,
    otherwise: dict[str, Any] | None = None,
) -> Grammar:
    """Of outputs that call one of ``functions`` (``name``, ``parameters``), or ``several`` times any of them.
    ``otherwise``: a schema of outputs that need not. ``special_ids``: special tokens by their text."""
    begins: tuple[tuple[str | int, ...], ...] = ()
    if syntax.form != "object":
        around = [[syntax.before_name, str(function["name"]), syntax.after_name] for function in functions]
        begins = tuple([tuple([special_ids.get(text, text) for text in texts if text]) for texts in around])
    calls = CallsGrammar(
        schemas=tuple([_call_schema(syntax, function) for function in functions]),
        begins=begins,
        is_free=syntax.form == "marked",
        opens=syntax.opens,
        opens_token=special_ids.get(syntax.opens),
        closes=syntax.closes,
        closes_token=special_ids.get(syntax.closes),
        listed=syntax.listed,
        several=several and bool(syntax.opens),
        otherwise=otherwise,
    )
    return Grammar("calls", msgspec.json.encode(calls).decode())


def _call_schema(syntax: CallSyntax, function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters") or {"type": "object"}
    if syntax.form != "object":
        return dict(parameters)
    parameters = _within(parameters, f"#/properties/{syntax.arguments}")
    properties = {"name": {"const": function["name"]}, syntax.arguments: parameters}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


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
