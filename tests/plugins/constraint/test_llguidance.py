"""Constraint ``llguidance``."""

from __future__ import annotations

import json

import pytest

from engine.contracts.constraint import Grammar, GrammarError
from engine.service.parts import CallText, merged
from engine.service.tool_parser import ToolParser
from engine.service.tool_syntax import SYNTAXES, CallSyntax, call_grammar
from engine.testing.constraint import ConstraintConformance
from engine_plugins.constraint.llguidance import LLGuidance, LLGuidanceConfig

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OF_A_CALL = {
    "functions": "<tool_call>\n<function=look_up>\n<parameter=city>\nBrno\n</parameter>\n</function>\n</tool_call>",
    "pairs": "<tool_call>look_up\n<arg_key>city</arg_key>\n<arg_value>Brno</arg_value>\n</tool_call>",
    "fenced": '<｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n{"city": "Brno"}\n```<｜tool▁call▁end｜>',
    "separated": '<｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{"city": "Brno"}<｜tool▁call▁end｜>',
    "sections": '<|tool_call_begin|>functions.look_up<|tool_call_argument_begin|>{"city": "Brno"}<|tool_call_end|>',
    "tagged": '<tool_call>\n{"name": "look_up", "arguments": {"city": "Brno"}}\n</tool_call>',
    "named": '[TOOL_CALLS]look_up[ARGS]{"city": "Brno"}',
    "listed": '[TOOL_CALLS][{"name": "look_up", "arguments": {"city": "Brno"}}]',
    "token_listed": '<|tool_call|>[{"name": "look_up", "arguments": {"city": "Brno"}}]',
    "bare": '{"name": "look_up", "parameters": {"city": "Brno"}}',
}


class TestLLGuidance(ConstraintConformance):
    def make(self) -> LLGuidance:
        return LLGuidance(LLGuidanceConfig(), self.context())

    @pytest.mark.parametrize("name", ["tagged", "named"])
    @pytest.mark.parametrize(
        ("reference", "definition", "root"),
        [
            ("#/$defs/X", {}, {"$id": "http://here/"}),
            ("http://here/#/$defs/X", {}, {"$id": "http://here/"}),
            ("#x", {"$anchor": "x"}, {}),
            ("x.json", {"$id": "x.json"}, {}),
        ],
    )
    def test_references_by_anchor_and_id_hold_in_calls(
        self, name: str, reference: str, definition: dict[str, str], root: dict[str, str]
    ) -> None:
        syntax = next(each for each in SYNTAXES if each.name == name)
        found = {"$defs": {"X": definition | {"type": "integer"}}, "properties": {"city": {"$ref": reference}}}
        function = {"name": "look_up", "parameters": root | CITY | found}
        matcher = self.make().compile(call_grammar(syntax, [function], {}))
        taken = [matcher.advance(token) for token in self.tokens(OF_A_CALL[name])]
        text = OF_A_CALL[name].replace('"Brno"', "12")
        assert not all(taken), "a text is no integer"
        matcher = self.make().compile(call_grammar(syntax, [function], {}))
        assert all(matcher.advance(token) for token in self.tokens(text))

    @pytest.mark.parametrize(("wrong", "said"), [({"not": {}}, "not"), ({"$ref": "http://other/"}, "http://other/")])
    def test_what_is_refused_in_calls_is_named_without_their_grammar(self, wrong: dict[str, object], said: str) -> None:
        syntax = next(each for each in SYNTAXES if each.name == "tagged")
        function = {"name": "look_up", "parameters": CITY | {"properties": {"city": wrong}}}
        with pytest.raises(GrammarError, match=said) as error:
            self.make().compile(call_grammar(syntax, [function], {}))
        assert [word for word in ("%json", "call0", "|", "x-guidance") if word in str(error.value)] == []

    @pytest.mark.parametrize(("most", "text"), [(8, '{ "a" :\n1 }'), (0, '{"a":1}')])
    def test_whitespace_in_json_ends(self, most: int, text: str) -> None:
        """A model that is stuck writes blanks for ever otherwise."""
        made = LLGuidance(LLGuidanceConfig(max_whitespace=most), self.context())
        matcher = made.compile(Grammar("json_object"))
        assert all(matcher.advance(token) for token in self.tokens(text))
        matcher = made.compile(Grammar("json_object"))
        assert matcher.advance(self.tokens("{")[0])
        (blank,) = self.tokens("\n")
        assert [matcher.advance(blank) for _ in range(most + 1)] == [True] * most + [False]

    @pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: syntax.name)
    def test_calls_follow_the_grammar_of_their_syntax(self, syntax: CallSyntax) -> None:
        functions = [{"name": "look_up", "parameters": CITY}, {"name": "now"}]
        grammar = call_grammar(syntax, functions, {}, several=False)
        made, text = LLGuidance(LLGuidanceConfig(), self.context()), OF_A_CALL[syntax.name]
        parser = ToolParser(syntax, {"look_up": CITY, "now": {}})
        (call,) = merged([*parser.feed(text), *parser.finish()])
        assert isinstance(call, CallText) and call.name == "look_up" and json.loads(call.arguments) == {"city": "Brno"}
        matcher = made.compile(grammar)
        assert all(matcher.advance(token) for token in self.tokens(text))
        for other in (text.replace("look_up", "delete"), "Hello"):
            matcher = made.compile(grammar)
            assert not all(matcher.advance(token) for token in self.tokens(other))
        if syntax.form != "marked":  # whose values are no JSON
            matcher = made.compile(grammar)
            assert not all(matcher.advance(token) for token in self.tokens(text.replace('"Brno"', "12")))

    def test_parameters_may_refer_to_their_own_definitions(self) -> None:
        parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/X"}}, "required": ["a"]}
        parameters["$defs"] = {"X": {"type": "integer"}}
        made = LLGuidance(LLGuidanceConfig(), self.context())
        for syntax in SYNTAXES:
            made.compile(call_grammar(syntax, [{"name": "f", "parameters": parameters}], {}))
        tagged = next(syntax for syntax in SYNTAXES if syntax.name == "tagged")
        matcher = made.compile(call_grammar(tagged, [{"name": "f", "parameters": parameters}], {}))
        text = '<tool_call>{"name": "f", "arguments": {"a": '
        assert all(matcher.advance(token) for token in self.tokens(text))
        assert not matcher.advance(self.tokens('"')[0]) and matcher.advance(self.tokens("3")[0])
