"""Grammars that would take a process down are compiled where that harms nobody."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engine.assembly.assemble import assemble
from engine.contracts.constraint import Grammar
from engine.service.grammar_worker import GrammarWorker
from tests.selection import few

from .fakes import in_loop


@asynccontextmanager
async def worker() -> AsyncIterator[GrammarWorker]:
    made = GrammarWorker(assemble(["model.path=bundled", "device=cpu"]))
    try:
        yield made
    finally:
        made.close()


def referring(count: int) -> Grammar:
    """A schema that refers to one that refers to one ..."""
    found = {f"D{i}": {"$ref": f"#/$defs/D{i + 1}"} for i in range(count)}
    schema = {"$defs": {**found, f"D{count}": {"type": "string"}}, "$ref": "#/$defs/D0"}
    return Grammar("json_schema", json.dumps(schema))


def rules(count: int) -> Grammar:
    lines = [f'r{i}: "a" r{i + 1} | r{i + 1}' for i in range(count)]
    return Grammar("lark", "\n".join(["start: r0", *lines, f'r{count}: "z"']))


@few(1)
@pytest.mark.parametrize("grammar", [referring(20_000), rules(20_000)], ids=["references", "rules"])
@in_loop
async def test_a_grammar_that_overflows_the_stack_is_refused_and_the_next_one_is_not(grammar: Grammar) -> None:
    async with worker() as made:
        verdict = await made.verdict(grammar, 5.0)
        assert verdict.words and not verdict.is_fault
        assert not (await made.verdict(Grammar("regex", "a+"), 5.0)).words


@in_loop
async def test_a_grammar_that_takes_too_long_ends_its_own_request() -> None:
    lines = [f'r{i} ::= "a" r{i + 1} | "b" r{i + 1}' for i in range(3600)]
    slow = Grammar("gbnf", "\n".join(["root ::= r0", *lines, 'r3600 ::= "z"']))
    async with worker() as made:
        verdict = await made.verdict(slow, 0.2)
        assert "took more than 0.2 s of CPU time (constraint.compile_s=0.2)" in verdict.words
        assert not (await made.verdict(Grammar("json_object"), 5.0)).words


@in_loop
async def test_a_grammar_that_is_wrong_is_refused_in_the_plugins_words() -> None:
    async with worker() as made:
        for grammar, words in (
            (Grammar("json_schema", '{"uniqueItems": true}'), "uniqueItems"),
            (Grammar("json_schema", '{"$ref": "#"}'), ""),
            (Grammar("regex", r"[^\x00-\x{10FFFF}]"), ""),
            (Grammar("json_schema", '{"x-guidance": {"lenient": true}}'), "x-guidance"),
            (Grammar("lark", '%llguidance {"no_forcing": true}\nstart: "a"'), "%llguidance"),
            (Grammar("gbnf", 'root ::= "a"\n %llguidance {}'), "%llguidance"),
            (Grammar("choice", '["<|end|>x"]'), "special token"),
            (Grammar("json_schema", '{"properties": {"<|end|>": {}}}'), "special token"),
        ):
            verdict = await made.verdict(grammar, 5.0)
            assert verdict.words and words in verdict.words and not verdict.is_fault, grammar
