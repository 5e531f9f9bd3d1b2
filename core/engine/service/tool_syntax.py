"""How models write calls of tools, and the grammar of an output that must call one.

A model writes calls as its chat template taught it, so the template's own text tells the syntax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.contracts.constraint import CallsGrammar, Grammar


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """A call is a JSON object ``{"name": ..., ARGUMENTS: {...}}`` after ``opens``."""

    name: str
    marker: str
    """A template with this text uses the syntax."""
    opens: str = ""
    """Before each call, or with ``listed`` before all; empty: an output that begins with a call has them."""
    closes: str = ""
    """After each call."""
    arguments: str = "arguments"
    listed: bool = False
    """The calls are an array."""


SYNTAXES = (
    CallSyntax("tagged", "<tool_call>", "<tool_call>", "</tool_call>"),
    CallSyntax("listed", "[TOOL_CALLS]", "[TOOL_CALLS]", listed=True),
    CallSyntax("bare", '"parameters"', arguments="parameters"),
)
"""Looked for in this order. Calls in other syntaxes are text."""


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
    calls = CallsGrammar(
        schemas=tuple([_call_schema(syntax, function) for function in functions]),
        opens=syntax.opens,
        opens_token=special_ids.get(syntax.opens),
        closes=syntax.closes,
        listed=syntax.listed,
        several=several and bool(syntax.opens),
        otherwise=otherwise,
    )
    return Grammar("calls", msgspec.json.encode(calls).decode())


def _call_schema(syntax: CallSyntax, function: Mapping[str, Any]) -> dict[str, Any]:
    properties = {
        "name": {"const": function["name"]},
        syntax.arguments: function.get("parameters") or {"type": "object"},
    }
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
