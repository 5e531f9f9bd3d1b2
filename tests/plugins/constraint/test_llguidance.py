"""Constraint ``llguidance``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from engine.contracts.constraint import Grammar, GrammarError
from engine.service.parts import CallText, merged
from engine.service.tool_parser import ToolParser
from engine.service.tool_syntax import CHANNELS, SYNTAXES, CallSyntax, call_grammar
from engine.testing.constraint import ConstraintConformance
from engine_plugins.constraint.llguidance import LLGuidance, LLGuidanceConfig

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OF_A_CALL = {
    "harmony": '<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"city": "Brno"}',
    "functions": "<tool_call>\n<function=look_up>\n<parameter=city>\nBrno\n</parameter>\n</function>\n</tool_call>",
    "pairs": "<tool_call>look_up\n<arg_key>city</arg_key>\n<arg_value>Brno</arg_value>\n</tool_call>",
    "fenced": '<｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n```json\n{"city": "Brno"}\n```<｜tool▁call▁end｜>',
    "separated": '<｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{"city": "Brno"}<｜tool▁call▁end｜>',
    "sections": '<|tool_call_begin|>functions.look_up<|tool_call_argument_begin|>{"city": "Brno"}<|tool_call_end|>',
    "tagged": '<tool_call>\n{"name": "look_up", "arguments": {"city": "Brno"}}\n</tool_call>',
    "named": '[TOOL_CALLS]look_up[ARGS]{"city": "Brno"}',
    "listed": '[TOOL_CALLS][{"name": "look_up", "arguments": {"city": "Brno"}}]',
    "token_listed": '<|tool_call|>[{"name": "look_up", "arguments": {"city": "Brno"}}]',
    "lines": '<function_calls>look_up(city="Brno")</function_calls>',
    "quoted": '<|tool_call>call:look_up{city:<|"|>Brno<|"|>}<tool_call|>',
    "escaped": "<start_function_call>call:look_up{city:<escape>Brno<escape>}<end_function_call>",
    "pythonic": '[look_up(city="Brno")]',
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
        if syntax.form in ("object", "named"):  # whose values are JSON
            matcher = made.compile(grammar)
            assert not all(matcher.advance(token) for token in self.tokens(text.replace('"Brno"', "12")))

    def test_special_tokens_of_a_syntax_may_stand_in_what_is_not_described(self) -> None:
        """And no others. Here ``<|system|>`` opens a call, ``<|user|>`` is a quote, and ``<|pad|>`` is no part."""
        syntax = CallSyntax(
            "made_up", "", "<|system|>", form="literal", after_name="{", after_key=":", ends="}", quote="<|user|>"
        )
        specials = {"<|system|>": 3, "<|user|>": 4, "<|pad|>": 0}
        made = LLGuidance(LLGuidanceConfig(), self.context())
        output = [3, *self.tokens("look_up{a:"), 4, *self.tokens("x, y"), 4, *self.tokens("}")]
        for between, allowed in ((), True), ((3,), True), ((0,), False):
            matcher = made.compile(call_grammar(syntax, [{"name": "look_up"}], specials))
            assert all(matcher.advance(token) for token in output)
            assert all(matcher.advance(token) for token in between) is allowed

    def test_what_an_output_thinks_and_answers_in_messages_has_their_headers(self) -> None:
        """Here special tokens of the bundled model stand for those of the headers."""
        names = {
            "<|channel|>": "<|system|>",
            "<|message|>": "<|user|>",
            "<|start|>": "<|begin|>",
            "<|constrain|>": "<|pad|>",
        }
        names |= {"<|end|>": "<|assistant|>"}
        ids = {name: self.tokens(text)[0] for name, text in names.items()}

        def tokens(text: str) -> list[int]:
            pieces = re.split(r"(<\|\w+\|>)", text)
            return [token for piece in pieces for token in ([ids[piece]] if piece in ids else self.tokens(piece))]

        thought = "<|channel|>analysis<|message|>Why {?<|end|><|start|>assistant"
        call = '<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"city": "Brno"}'
        answer, functions = '<|channel|>final<|message|>{"city": "Brno"}', [{"name": "look_up", "parameters": CITY}]
        made = LLGuidance(LLGuidanceConfig(), self.context())
        must_call = call_grammar(CHANNELS, functions, ids)
        may_call = call_grammar(CHANNELS, functions, ids, otherwise=CITY)
        may_not = call_grammar(CHANNELS, (), ids, otherwise=CITY)
        for grammar, outputs in ((must_call, {call}), (may_call, {call, answer}), (may_not, {answer})):
            for output in (call, answer):
                for begin in ("", thought, thought * 2):
                    matcher = made.compile(grammar)
                    assert all(matcher.advance(token) for token in tokens(begin))
                    assert all(matcher.advance(token) for token in tokens(output)) is (output in outputs)
        anything = call_grammar(CHANNELS, functions, ids, in_text=True)
        for output, allowed in (
            (call, True),
            (answer + "?", True),
            (call.replace('"Brno"', "12"), False),
            ("Hi", False),
        ):
            matcher = made.compile(anything)
            assert all(matcher.advance(token) for token in tokens(thought + output)) is allowed
        for output in ("Hello", thought + thought[9:], answer.replace("final", "other"), thought.replace("Why", call)):
            matcher = made.compile(may_call)
            assert not all(matcher.advance(token) for token in tokens(output))
        matcher = made.compile(may_call)
        assert all(matcher.advance(token) for token in tokens(thought[:40]))
        assert not self.allowed(matcher)[list(self.ends)].any(), "an output does not end within a thought"

    @pytest.mark.parametrize("syntax", [each for each in SYNTAXES if not each.answer], ids=lambda syntax: syntax.name)
    @pytest.mark.parametrize("special", [False, True])
    def test_calls_in_text_follow_the_grammar_of_their_syntax(self, syntax: CallSyntax, special: bool) -> None:
        """``special``: what opens a call is a special token, and so is what may stand in the text."""
        if special and not syntax.opens:
            pytest.skip("nothing opens a call")
        opens, around, *_ = (token for token in self.specials() if token not in self.ends)
        ids = {syntax.opens: opens, **dict.fromkeys(syntax.wraps, around)} if special else {}
        functions = [{"name": "look_up", "parameters": CITY}, {"name": "now"}]
        made = LLGuidance(LLGuidanceConfig(), self.context())
        grammar = call_grammar(syntax, functions, ids, in_text=True)

        def follows(*texts: str) -> bool:
            matcher = made.compile(grammar)
            tokens = [token for text in texts for token in self.tokens(text)]
            if special:
                begin = self.tokens(syntax.opens)
                found = [at for at in range(len(tokens)) if tokens[at : at + len(begin)] == begin]
                for at in reversed(found):
                    tokens[at : at + len(begin)] = [around, opens] if syntax.wraps else [opens]
            return all(matcher.advance(token) for token in [*tokens, self.ends[0]])

        text = OF_A_CALL[syntax.name]
        assert follows("Hello {") and follows("") and follows(text)
        if syntax.opens:
            assert follows("I see. ", text) and not follows("I see. ", text.replace("look_up", "delete"))
        assert not follows(text.replace("look_up", "delete"))
        assert syntax.form in ("marked", "literal") or not follows(text.replace('"Brno"', "12"))

    def test_special_tokens_may_stand_around_calls_that_nothing_opens(self) -> None:
        pythonic = next(syntax for syntax in SYNTAXES if syntax.name == "pythonic")
        begins, ends, *_ = (token for token in self.specials() if token not in self.ends)
        ids = dict(zip(pythonic.wraps, (begins, ends), strict=True))
        grammar = call_grammar(pythonic, [{"name": "look_up", "parameters": CITY}], ids, in_text=True)
        made, call = LLGuidance(LLGuidanceConfig(), self.context()), self.tokens(OF_A_CALL["pythonic"])
        for output in (call, [begins, *call, ends], [begins, *call], self.tokens("Hello ["), []):
            matcher = made.compile(grammar)
            assert all(matcher.advance(token) for token in [*output, self.ends[0]])
        matcher = made.compile(grammar)
        other = self.tokens(OF_A_CALL["pythonic"].replace("look_up", "delete"))
        assert not all(matcher.advance(token) for token in [begins, *other])

    def specials(self) -> list[int]:
        added = json.loads((Path(self.context().model.path) / "tokenizer.json").read_text())["added_tokens"]
        return [token["id"] for token in added if token["special"]]

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
