"""Conformance suite for constraints: derive a test class, say how to make yours, and run pytest.

.. code-block:: python

    class TestMine(ConstraintConformance):
        kinds = ("regex", "choice")  # of grammars that it can follow

        def make(self):
            return Mine(MineConfig(), self.context())

The vocabulary is that of the bundled model.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.assembly.assemble import assemble
from engine.assembly.bind import build_context
from engine.contracts.constraint import CallsGrammar, Constraint, Grammar, GrammarError, GrammarKind, Matcher
from engine.contracts.provider import BuildContext
from engine.plugin_guard.calls import lacking
from engine.testing.subject import Subject, Suite, filled

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"enum": [1, 22, 333]},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "size", "ok"],
    "additionalProperties": False,
}
WORDS = ("yes", "no", "yes, but\nlater")


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _is_of_schema(text: str) -> bool:
    found = _object(text)
    if found is None or list(found) != ["name", "size", "ok"]:
        return False
    return len(found["name"]) <= 8 and found["size"] in (1, 22, 333) and isinstance(found["ok"], bool)


def _refused(made: Constraint, grammar: Grammar) -> str:
    """Why a grammar is; empty if it is not."""
    try:
        made.compile(grammar)
    except GrammarError as error:
        return str(error) or "no reason"
    return ""


@dataclass(frozen=True)
class Case:
    """A grammar, texts that are of it and texts that are not, and whether any text is."""

    grammar: Grammar
    accepted: tuple[str, ...]
    refused: tuple[str, ...]
    check: Callable[[str], bool]


CASES: dict[GrammarKind, Case] = {
    "json_schema": Case(
        Grammar("json_schema", json.dumps(SCHEMA)),
        ('{"name": "a", "size": 22, "ok": true}', '{"name":"","size":1,"ok":false}'),
        ('{"name": "a", "size": 2, "ok": true}', '{"size": 1}', "hello", '{"name": "too long a name", "size": 1}'),
        _is_of_schema,
    ),
    "json_object": Case(
        Grammar("json_object"),
        ("{}", '{"a": [1, 2.5, null, {"b": "c"}]}'),
        ("[]", "1", '{"a": }'),
        lambda text: _object(text) is not None,
    ),
    "regex": Case(
        Grammar("regex", "[ab]{2,5}c|[0-9]+"),
        ("abc", "bbbbbc", "0123456789"),
        ("c", "abcc", "12a", "ac "),
        lambda text: re.fullmatch("[ab]{2,5}c|[0-9]+", text) is not None,
    ),
    "choice": Case(Grammar("choice", json.dumps(WORDS)), WORDS, ("maybe", "yesno", "ye"), WORDS.__contains__),
    "lark": Case(
        Grammar("lark", 'start: "<" inner ">"\ninner: /[a-z]/ | start'),
        ("<a>", "<<<z>>>"),
        ("a", "<ab>", "<<a>"),
        lambda text: re.fullmatch(r"<+[a-z]>+", text) is not None and text.count("<") == text.count(">"),
    ),
    "gbnf": Case(
        Grammar("gbnf", 'root ::= "x" ("y" | "z")+ "!"'),
        ("xy!", "xzzyz!"),
        ("x!", "xy?", "y!"),
        lambda text: re.fullmatch(r"x[yz]+!", text) is not None,
    ),
}
CALLS = CallsGrammar(
    tuple(
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "arguments": {"type": "object", "properties": {"n": {"type": "integer"}}},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in ("one", "two")
    ),
    opens="<call>",
    closes="</call>",
    several=True,
)
CASES["calls"] = Case(
    Grammar("calls", msgspec.json.encode(CALLS).decode()),
    (
        '<call>{"name": "two", "arguments": {"n": 3}}</call>',
        '<call>\n{"name": "one", "arguments": {}}\n</call>\n<call>\n{"name": "two", "arguments": {}}\n</call>',
    ),
    ("hello", '{"name": "one", "arguments": {}}', '<call>{"name": "six", "arguments": {}}</call>', "<call></call>"),
    lambda text: re.fullmatch(r"(\n?<call>\n?\{.*\}\n?</call>)+", text, re.DOTALL) is not None,
)
ONE = '{"name": "one", "arguments": {}}'
IN_TEXT = (
    (
        msgspec.structs.replace(CALLS, in_text=True),
        ("hello", "", "a <cal b", f"so: <call>{ONE}</call>", f"<call>\n{ONE}\n</call> and <call>{ONE}</call> bye"),
        ("a <call> b", '<call>{"name": "six", "arguments": {}}</call>', f"<call>{ONE}"),
    ),
    (
        msgspec.structs.replace(CALLS, in_text=True, opens="", closes="", several=False),
        ("hello", " hello {}", "", ONE),
        ('{"name": "six", "arguments": {}}', "{}"),
    ),
)
"""Calls that need not be made: texts that are of the grammar, and texts that are not."""
WRONG: dict[GrammarKind, str] = {
    "json_schema": '{"type": "no such type"}',
    "regex": "(a",
    "lark": "start: no_such_rule",
    "gbnf": "root ::= (",
}
MOST_TOKENS, WALKS, TRIED = 200, 20, 40


@cache
def _bundled() -> tuple[BuildContext, Tokenizer]:
    context = build_context(assemble(["model.path=bundled", "device=cpu"]))
    return context, Tokenizer.from_file(str(Path(context.model.path) / "tokenizer.json"))


class ConstraintConformance:
    """What the core relies on."""

    kinds: tuple[GrammarKind, ...] = tuple(CASES)
    """Grammars that the constraint can follow; it refuses others."""

    def make(self) -> Constraint:
        """The constraint under test."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self)")

    def context(self) -> BuildContext:
        """Of the bundled model."""
        return _bundled()[0]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "kind" in metafunc.fixturenames:
            metafunc.parametrize("kind", self.kinds)

    @property
    def ends(self) -> tuple[int, ...]:
        return self.context().model.eos_token_ids

    def tokens(self, text: str) -> list[int]:
        return list(_bundled()[1].encode(text, add_special_tokens=False).ids)

    def text(self, tokens: Sequence[int]) -> str:
        return str(_bundled()[1].decode(list(tokens)))

    def allowed(self, matcher: Matcher, before: int = 0) -> Tensor:
        """bool ``[vocab_size]``. ``before``: what the memory of the mask holds."""
        vocab_size = self.context().model.vocab_size
        mask = torch.full((-(-vocab_size // 32),), before, dtype=torch.int32)
        matcher.fill(mask)
        bits = (mask[:, None] >> torch.arange(32)) & 1
        assert not bits.flatten()[vocab_size:].any(), "tokens beyond the vocabulary are allowed"
        return bits.flatten()[:vocab_size].bool()

    def test_it_fulfils_the_contract(self) -> None:
        made = self.make()
        assert isinstance(made, Constraint), lacking(made, Constraint)
        assert isinstance(made.compile(CASES[self.kinds[0]].grammar), Matcher)

    def test_texts_of_the_grammar_are_followed_to_their_end(self, kind: GrammarKind) -> None:
        case, made = CASES[kind], self.make()
        for text in case.accepted:
            matcher = made.compile(case.grammar)
            for token in self.tokens(text):
                assert self.allowed(matcher)[token], f"{text!r}: token {token} is forbidden"
                assert matcher.advance(token)
            for end in self.ends:
                assert self.allowed(matcher)[end], f"{text!r} may not end"
                assert matcher.advance(end)
                matcher.roll_back(1)

    def test_other_texts_are_not(self, kind: GrammarKind) -> None:
        case, made = CASES[kind], self.make()
        for text in case.refused:
            matcher = made.compile(case.grammar)
            for token in [*self.tokens(text), self.ends[0]]:
                if not self.allowed(matcher)[token]:
                    break
                assert matcher.advance(token)
            else:
                raise AssertionError(f"{text!r} is allowed")

    def test_a_refused_token_changes_nothing(self, kind: GrammarKind) -> None:
        matcher = self.make().compile(CASES[kind].grammar)
        before, refused = self.allowed(matcher), 0
        for token in (~before).nonzero().flatten().tolist()[:TRIED]:
            if matcher.advance(token):  # another spelling
                matcher.roll_back(1)
            else:
                refused += 1
            assert torch.equal(self.allowed(matcher), before)
        assert refused

    def test_what_masks_allow_may_be_taken_all_along_an_output(self, kind: GrammarKind) -> None:
        """And outputs of any allowed tokens are texts of the grammar."""
        case, made = CASES[kind], self.make()
        for number in range(WALKS):
            draw, matcher, output = random.Random(number), made.compile(case.grammar), list[int]()
            while len(output) < MOST_TOKENS:
                allowed = self.allowed(matcher, before=-1)
                assert allowed.any(), f"nothing may follow {self.text(output)!r}"
                ids = allowed.nonzero().flatten().tolist()
                for token in draw.sample(ids, min(TRIED // (1 + len(output)), len(ids))):
                    assert matcher.advance(token), f"token {token} after {self.text(output)!r}"
                    matcher.roll_back(1)
                open_ends = [end for end in self.ends if allowed[end]]
                if open_ends and (draw.random() < 0.3 or allowed.sum() == len(open_ends)):
                    assert case.check(self.text(output)), self.text(output)
                    break
                while (token := draw.choice(ids)) in self.ends:
                    continue
                assert matcher.advance(token)
                output.append(token)

    def test_calls_stand_in_text_where_they_may(self) -> None:
        made = self.make()
        for calls, accepted, refused in IN_TEXT if "calls" in self.kinds else ():
            grammar = Grammar("calls", msgspec.json.encode(calls).decode())
            for text in (*accepted, *refused):
                matcher = made.compile(grammar)
                tokens = [*self.tokens(text), self.ends[0]]
                follows = all(self.allowed(matcher)[token] and matcher.advance(token) for token in tokens)
                assert follows == (text in accepted), text

    def test_the_end_may_follow_the_end(self, kind: GrammarKind) -> None:
        """A step may be under way for a request that has ended."""
        matcher = self.make().compile(CASES[kind].grammar)
        for token in [*self.tokens(CASES[kind].accepted[0]), self.ends[0]]:
            assert matcher.advance(token)
        assert self.allowed(matcher)[list(self.ends)].any()

    def test_tokens_are_taken_back(self, kind: GrammarKind) -> None:
        matcher = self.make().compile(CASES[kind].grammar)
        text = self.tokens(CASES[kind].accepted[-1])
        for length in range(1, len(text) + 1):
            masks = []
            for token in text[:length]:
                masks.append(self.allowed(matcher))
                assert matcher.advance(token)
            matcher.roll_back(1)
            assert torch.equal(self.allowed(matcher), masks[-1])
            matcher.roll_back(length - 1)
            assert torch.equal(self.allowed(matcher), masks[0])

    def test_the_end_is_taken_back(self, kind: GrammarKind) -> None:
        """It may have been a draft."""
        matcher = self.make().compile(CASES[kind].grammar)
        for token in self.tokens(CASES[kind].accepted[0]):
            assert matcher.advance(token)
        before = self.allowed(matcher)
        assert matcher.advance(self.ends[0])
        self.allowed(matcher)
        matcher.roll_back(1)
        assert torch.equal(self.allowed(matcher), before)

    def test_what_is_forced_follows_and_changes_nothing(self, kind: GrammarKind) -> None:
        """It is text that every output has here: none that is accepted goes on otherwise."""
        for text in CASES[kind].accepted:
            matcher, tokens = self.make().compile(CASES[kind].grammar), self.tokens(text)
            for at, token in enumerate(tokens):
                before, forced = self.allowed(matcher), list(matcher.forced())
                assert torch.equal(self.allowed(matcher), before)
                for number, each in enumerate(forced):
                    assert self.allowed(matcher)[each] and matcher.advance(each), f"{each} after {text!r}[:{at}]"
                    so_far, whole = self.text([*tokens[:at], *forced[: number + 1]]), self.text(tokens)
                    assert whole.startswith(so_far), f"{so_far!r} is forced, and {whole!r} accepted"
                matcher.roll_back(len(forced))
                assert torch.equal(self.allowed(matcher), before)
                assert matcher.advance(token)

    def test_matchers_of_one_grammar_are_independent(self, kind: GrammarKind) -> None:
        made, text = self.make(), self.tokens(CASES[kind].accepted[-1])
        first, other = made.compile(CASES[kind].grammar), made.compile(CASES[kind].grammar)
        before = self.allowed(first)
        for token in text:
            assert first.advance(token)
        assert torch.equal(self.allowed(other), before)
        assert all(other.advance(token) for token in text)
        assert torch.equal(self.allowed(other), self.allowed(first))

    def test_wrong_grammars_are_refused_in_a_line(self) -> None:
        made = self.make()
        for kind in set(WRONG) & set(self.kinds):
            why = _refused(made, Grammar(kind, WRONG[kind]))
            assert why.strip() and "\n" not in why, f"{kind}: {why!r}"

    def test_kinds_that_it_does_not_follow_are_refused(self) -> None:
        made = self.make()
        for kind in sorted(set(CASES) - set(self.kinds)):
            assert _refused(made, CASES[kind].grammar), f"{kind} is not among its kinds, and it compiles one"

    def test_grammars_are_compiled_while_others_are_followed(self) -> None:
        made = self.make()
        cases = [CASES[kind] for kind in self.kinds] * 4

        def follow(case: Case) -> bool:
            matcher = made.compile(case.grammar)
            return all(
                self.allowed(matcher)[token] and matcher.advance(token) for token in self.tokens(case.accepted[0])
            )

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(follow, cases))


def suite_for(subject: Subject) -> Suite:
    """For ``engine plugins check``: of the kinds that the plugin compiles."""
    made = subject.build(_bundled()[0])
    kinds = tuple(kind for kind, case in CASES.items() if subject.tried(made.compile, case.grammar) is not None)
    return filled(subject, [ConstraintConformance], make=lambda self: subject.build(_bundled()[0]), kinds=kinds)
