"""A grammar travels with its request, and is the key of what is compiled of it."""

from __future__ import annotations

import msgspec

from engine.contracts.constraint import Grammar
from engine.contracts.request import EngineRequest, SamplingParams


def test_a_grammar_reaches_the_engine_as_it_was() -> None:
    grammar = Grammar("json_schema", '{"const": "\u00e9\\u0000"}')
    sent = EngineRequest("r", (1,), SamplingParams(grammar=grammar))
    got = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=EngineRequest)
    assert got == sent and hash(got.sampling.grammar) == hash(grammar)


def test_one_text_is_another_grammar_of_another_kind() -> None:
    assert len({Grammar("regex", "a"), Grammar("lark", "a"), Grammar("regex", "a")}) == 2
