"""Grammars that are made to take all time or memory, through the limits that requests have."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from engine.assembly.assemble import assemble
from engine.assembly.bind import build_context
from engine.contracts.constraint import Grammar, GrammarError
from engine.service.grammars import too_large
from engine_plugins.constraint.llguidance import LLGuidance, LLGuidanceConfig

STEPS = 30
ARRAY, OBJECT = '{"type": "array", "items": @}', '{"type": "object", "properties": {"a": @}}'


def chain(count: int) -> dict[str, Any]:
    """References that double at every level."""
    levels = {f"l{i}": {"allOf": [{"$ref": f"#/$defs/l{i + 1}"}] * 2} for i in range(count)}
    return {"$defs": {**levels, f"l{count}": {"type": "string"}}, "$ref": "#/$defs/l0"}


def deep(count: int, around: str) -> str:
    """``around``: a schema with ``@`` in the place of an inner one."""
    left, _, right = around.partition("@")
    return left * count + '{"type": "string"}' + right * count


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


SCHEMAS: dict[str, Any] = {
    "references in a circle": {"$ref": "#"},
    "two references in a circle": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
    "references that double": chain(24),
    "a long string": {"type": "string", "maxLength": 10**6},
    "a long array": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
    "many optional properties": optional(500),
    "too many optional properties": optional(5000),
    "many alternatives": {"anyOf": [{"const": str(i)} for i in range(2000)]},
    "products of alternatives": {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": i}]} for i in range(16)]},
    "a large enum": {"enum": [*range(5000)]},
    "too large an enum": {"enum": [*range(100_000)]},
    "nested arrays": deep(60, ARRAY),
    "nested objects": deep(30, OBJECT),
    "too deeply nested": deep(400, OBJECT),
    "a slow pattern": {"type": "string", "pattern": "^(a+)+b$"},
    "a pattern of many places": {"type": "string", "pattern": "^(x?){2000}x{2000}$"},
    "recursive": {"type": "object", "properties": {"next": {"$ref": "#"}, "other": {"$ref": "#"}}},
    "a remote reference": {"$ref": "http://169.254.169.254/latest"},
    "a file": {"$ref": "file:///etc/passwd"},
    "a large number": {"type": "integer", "minimum": 10**400},
    "a fine multiple": {"type": "number", "multipleOf": 1e-300},
    "unknown words": {"type": "object", "frobnicate": {"x": [1] * 1000}},
    "pattern properties": {"type": "object", "patternProperties": {"^(a|b)*$": {}, "^(b|a)*$": {}}},
    "dependencies": {"dependentRequired": {f"p{i}": [f"p{i + 1}"] for i in range(200)}},
}
REGEXES = {
    "nested repetition": "(a+)+b",
    "many places": ".*a.{2000}b",
    "a million": "a{1,1000000}",
    "optional before required": "(x?){2000}x{2000}",
    "repetitions of nothing": "(a{0,1000}){0,1000}",
    "alternatives": "(a|b|ab)*c" * 20,
    "classes": r"[\p{L}\p{N}]{1,500}!",
    "unbalanced": "(" * 500,
    "nested groups": "(" * 400 + "a" + ")" * 400,
    "a word border": r"\ba\b",
    "looking ahead": "(?=a)b",
    "a reference back": r"(a)\1",
    "null": "\0",
    "all of Unicode": "[\U00000001-\U0010ffff]{0,4000}",
}
LARKS = {
    "left recursion": 'start: start "a" | "a"',
    "ambiguous": 'start: start start | "a" | ',
    "a long rule": "start: " + " ".join(['"a"'] * 5000),
    "many rules": "\n".join(["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(30)), 'r30: "a"']),
    "never ends": 'start: "a" start',
    "an include": "%import python (name)\nstart: name",
    "code": "start: {{ __import__('os').system('true') }}",
    "JSON inside": "start: %json " + json.dumps(optional(600)),
    "GBNF that is no Lark": 'root ::= "a"',
}
GBNF = {
    "left recursion": 'root ::= root "a" | "a"',
    "nested groups": "root ::= " + "(" * 200 + '"a"' + ")" * 200,
    "more nested groups": "root ::= " + "(" * 20_000,
    "a million": 'root ::= "a"{1,1000000}',
    "no root": 'a ::= "b"',
}
BOMBS = [
    *(
        pytest.param(
            Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema)), id=f"schema: {name}"
        )
        for name, schema in SCHEMAS.items()
    ),
    *(pytest.param(Grammar("regex", text), id=f"regex: {name}") for name, text in REGEXES.items()),
    *(pytest.param(Grammar("lark", text), id=f"lark: {name}") for name, text in LARKS.items()),
    *(pytest.param(Grammar("gbnf", text), id=f"gbnf: {name}") for name, text in GBNF.items()),
]


@pytest.fixture(scope="module")
def made() -> LLGuidance:
    return LLGuidance(LLGuidanceConfig(), build_context(assemble(["model.path=bundled", "device=cpu"])))


@pytest.mark.parametrize("grammar", BOMBS)
def test_a_bomb_is_refused_or_ends_within_its_limits(grammar: Grammar, made: LLGuidance) -> None:
    """A refusal is a line; a matcher goes on, or says that it cannot."""
    why = too_large(grammar, LLGuidanceConfig())
    if why:
        assert "\n" not in why
        return
    draw = random.Random(1)
    mask = torch.zeros(4096 // 32, dtype=torch.int32)
    try:
        matcher = made.compile(grammar)
        for _ in range(STEPS):
            matcher.fill(mask)
            allowed = (((mask[:, None] >> torch.arange(32)) & 1).flatten()).nonzero().flatten().tolist()
            assert allowed and matcher.advance(draw.choice(allowed))
    except GrammarError as error:
        assert str(error) and "\n" not in str(error)
