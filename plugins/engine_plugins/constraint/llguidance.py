"""Constraint ``llguidance``: an Earley parser over a lexer of derivatives, which computes each mask when it is asked.

The library (https://github.com/guidance-ai/llguidance) reads ``tokenizer.json`` itself. It refuses what it cannot
enforce of a JSON schema, and property order is that of the schema. A text that a grammar forces is spelt as the
vocabulary spells it. Left to the model (the library's ``no_forcing``) masks of long texts cost less, and outputs take
more tokens than that saves: ``docs/measured.md``.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.contracts.config import ConstraintConfig, at_least
from engine.contracts.constraint import CallsGrammar, Grammar, GrammarError
from engine.contracts.provider import BuildContext

if TYPE_CHECKING:
    from torch import Tensor

MOST_SAID = 300
"""Characters of the library's messages."""
MOST_ITEMS = 5000
"""Items of the parser that one mask may take: schemas take few, ambiguous grammars all that they are given, and a mask
half a second with the library's 50,000."""
_OPTIONS = re.compile(r"^\s*%llguidance\b", re.MULTILINE)
_SOURCE_LINE = re.compile(r"^ *\d+ \| ", re.MULTILINE)
_ANY_OBJECT = '{"type":"object"}'


@dataclass(frozen=True)
class LLGuidanceConfig(ConstraintConfig):
    """JSON schemas, regular expressions and grammars, by the library llguidance."""

    max_whitespace: int = 8
    """Most blanks, tabs and line ends between two tokens of JSON, of which a model that is stuck can write no end. 0:
    none, the most compact JSON."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("constraint.max_whitespace", self.max_whitespace, 0)


class LLGuidance:
    """The plugin. The library and the vocabulary are loaded with the first grammar."""

    def __init__(self, config: LLGuidanceConfig, context: BuildContext) -> None:
        self._config = config
        self._model = context.model
        self._loading = threading.Lock()
        self._loaded: tuple[Any, Any, Any] | None = None
        self._specials: tuple[str, ...] = ()

    def compile(self, grammar: Grammar) -> LLGuidanceMatcher:
        """Raises :class:`GrammarError`, in the library's words where it refuses one."""
        lib, tokenizer, limits = self._library()
        self._refuse(grammar)
        try:
            source = self._source(lib, grammar)
        except GrammarError:
            raise
        except Exception as error:  # the parser of GBNF, written in Python, has errors of its own
            raise GrammarError(_one_line(str(error))) from None
        # log_level=0: the library writes to stderr otherwise.
        matcher = lib.LLMatcher(tokenizer, source, limits=limits, log_level=0)
        first = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            said = matcher.get_error()
            raise GrammarError(_one_line(_without_source(said) if grammar.kind == "calls" else said))
        if not any(first):
            raise GrammarError("no output can follow it")
        return LLGuidanceMatcher(matcher, tokenizer.eos_tokens)

    def _refuse(self, grammar: Grammar) -> None:
        """What the library would read otherwise than it is meant."""
        if "x-guidance" in grammar.text:
            raise GrammarError("it has 'x-guidance', an extension of the library that clients cannot set")
        if grammar.kind in ("lark", "gbnf") and _OPTIONS.search(grammar.text):
            raise GrammarError("it has '%llguidance', options of the library that clients cannot set")
        fixed = "\n".join(_fixed_texts(grammar))
        if special := next((text for text in self._specials if text in fixed), None):
            raise GrammarError(f"it has the text {special!r}, which is a special token of this model")

    def _source(self, lib: Any, grammar: Grammar) -> str:
        """In the library's own form. Raises ``ValueError``."""
        match grammar.kind:
            case "json_schema" | "json_object":
                schema = grammar.text if grammar.kind == "json_schema" else _ANY_OBJECT
                return str(lib.LLMatcher.grammar_from_json_schema(schema, overrides=self._json_options()))
            case "regex":
                return str(lib.LLMatcher.grammar_from_regex(grammar.text))
            case "choice":
                options = " | ".join(json.dumps(choice) for choice in json.loads(grammar.text))
                return str(lib.LLMatcher.grammar_from_lark(f"start: {options}"))
            case "calls":
                calls = msgspec.json.decode(grammar.text, type=CallsGrammar)
                return str(lib.LLMatcher.grammar_from_lark(_lark_of(calls)))
            case "lark":
                return str(lib.LLMatcher.grammar_from_lark(grammar.text))
            case "gbnf":
                from llguidance.gbnf_to_lark import any_to_lark

                return str(lib.LLMatcher.grammar_from_lark(any_to_lark(grammar.text)))

    def _json_options(self) -> dict[str, Any]:
        most = self._config.max_whitespace
        if most == 0:
            return {"whitespace_flexible": False}
        return {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{most}}}"}

    def _library(self) -> tuple[Any, Any, Any]:
        """The library, the vocabulary as it has it, and its limits. Raises :class:`GrammarError`."""
        with self._loading:
            if self._loaded is None:
                import llguidance  # 0.1 s and more, which only a server that is asked for a grammar has to spend

                path = Path(self._model.path) / "tokenizer.json"
                try:
                    text = path.read_text(encoding="utf-8")
                    ends = list(self._model.eos_token_ids) or None
                    tokenizer = llguidance.LLTokenizer(text, n_vocab=self._model.vocab_size, eos_token=ends)
                except (OSError, ValueError) as error:
                    raise GrammarError(f"this model's vocabulary cannot be read: {path.name}: {error}") from None
                added = json.loads(text).get("added_tokens", ())
                self._specials = tuple([token["content"] for token in added if token.get("special")])
                self._loaded = (
                    llguidance,
                    tokenizer,
                    llguidance.LLParserLimits(verbose_errors=False, step_max_items=MOST_ITEMS),
                )
            return self._loaded


def _fixed_texts(grammar: Grammar) -> Iterator[str]:
    """Texts that an output must have as they are: choices, and in schemas names, constants and enums."""
    match grammar.kind:
        case "choice":
            yield from json.loads(grammar.text)
        case "json_schema":
            yield from _fixed_in(json.loads(grammar.text))
        case "calls":
            calls = msgspec.json.decode(grammar.text, type=CallsGrammar)
            for schema in (*calls.schemas, calls.otherwise):
                yield from _fixed_in(schema)


def _fixed_in(schema: Any) -> Iterator[str]:
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield from (name for name in value.get("properties") or () if isinstance(name, str))
            yield from (json.dumps(value[key], ensure_ascii=False) for key in ("const", "enum") if key in value)
            left += value.values()
        elif isinstance(value, list):
            left += value


_COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""At most one blank after a comma or a colon."""


def _lark_of(calls: CallsGrammar) -> str:
    """The grammar of calls in the notation of Lark, with the library's JSON schemas."""

    def schema(found: dict[str, Any]) -> str:
        return f"%json {json.dumps({**found, 'x-guidance': _COMPACT})}"

    opens = "before" if calls.in_text else _fixed([calls.opens if calls.opens_token is None else calls.opens_token])
    closes = _fixed([calls.closes if calls.closes_token is None else calls.closes_token])
    begins = [_fixed(found) for found in calls.begins] or [""] * len(calls.schemas)
    follows = ["free" if calls.is_free else schema(found) for found in calls.schemas]
    rules = [f"call{i}: {begin} {rest}" for i, (begin, rest) in enumerate(zip(begins, follows, strict=True))]
    between = "call line " + closes if calls.closes and not calls.is_free else "call"
    one = f"{opens} line {between}" if calls.opens and not calls.listed else "call"
    if calls.is_free:
        rules.append(f"free: ({' | '.join(['/(?s:.+)/', *[_fixed([token]) for token in calls.free_tokens]])})*")
    more = {(False, False): "one", (False, True): "one (line one)*", (True, False): f'{opens} "[" one "]"'}
    all_calls = more.get((calls.listed, calls.several), f'{opens} "[" one (/, ?/ one)* "]"')
    if calls.schemas:
        either = [f"call{i}" for i in range(len(calls.schemas))]
        rules += [f"calls: {all_calls}", f"one: {one}", f"call: {' | '.join(either)}", r"line: /\n?/"]
    if calls.otherwise is not None:
        rules.append(f"otherwise: {_fixed(calls.answer)} {schema(calls.otherwise)}")
    if calls.thought:
        rules.append(f"thought: {_fixed(calls.thought)} /(?s:.*)/ {_fixed(calls.ends_thought)}")
    if calls.in_text:
        start, text_rules = _text_around(calls)
        rules += text_rules
    else:
        start = " | ".join(["calls"] * bool(calls.schemas) + ["otherwise"] * (calls.otherwise is not None))
    return "\n".join([f"start: {'thought* ' * bool(calls.thought)}({start})", *rules])


def _fixed(pieces: Sequence[str | int]) -> str:
    """Texts, and special tokens by id, one after the other."""
    found = [json.dumps(each, ensure_ascii=False) if isinstance(each, str) else f"<[{each}]>" for each in pieces]
    return " ".join(found)


def _text_around(calls: CallsGrammar) -> tuple[str, list[str]]:
    """What an output is that need not call, and the rules of the text ``before`` a call and after the last."""
    opens = json.dumps(calls.opens, ensure_ascii=False)
    if calls.answer:
        return "after | calls", [f"after: {_fixed(calls.answer)} /(?s:.*)/"]
    if not calls.opens:
        bracket = r"\[" if any(begin[0] == "[" for begin in calls.begins) else "{"
        around = " | ".join(f"<[{token}]>" for token in calls.text_tokens)
        start = f"({around})? (after | calls) ({around})?" if around else "after | calls"
        return start, [rf"after: /\s*([^{bracket}\s](?s:.*))?/"]
    if calls.opens_token is not None:
        special = " | ".join(f"<[{token}]>" for token in calls.text_tokens)
        after = f"after: TEXT? (({special}) TEXT?)*" if special else "after: TEXT?"
        rules = [after, "TEXT: /(?s:.+)/", f"before: after <[{calls.opens_token}]>"]
    else:
        # A text that ends with the first ``opens``, and one that has none.
        before = f"before[suffix={opens}]: /(?s:.*)/"
        rules = [before, "after: TEXT?", f"TEXT: /(?s:.+)/ & ~(/(?s:.*)/ {opens} /(?s:.*)/)"]
    if calls.is_free:  # all that follows the name is the call's
        return "after | one", rules
    many = calls.several and not calls.listed
    return "one* after" if many else "calls? after", rules


class LLGuidanceMatcher:
    """The library's matcher, and the end tokens after an output that can only end: the library does not take them
    back."""

    def __init__(self, matcher: Any, ends: Sequence[int]) -> None:
        self._matcher = matcher
        self._ends = ends
        self._num_ends = 0

    def advance(self, token: int) -> bool:
        if self._matcher.is_stopped():
            self._num_ends += token in self._ends
            return token in self._ends
        taken = bool(self._matcher.try_consume_tokens([token]) == 1)
        self._check()
        return taken

    def roll_back(self, count: int) -> None:
        ends = min(count, self._num_ends)
        self._num_ends -= ends
        self._matcher.rollback(count - ends)

    def fill(self, mask: Tensor) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.numel() * 4)
        self._check()

    def forced(self) -> list[int]:
        found: list[int] = self._matcher.compute_ff_tokens()
        self._check()
        return found

    def _check(self) -> None:
        """The library does not raise: a matcher that is beyond its limits takes no more."""
        if self._matcher.is_error():
            raise GrammarError(_one_line(self._matcher.get_error()))


def _without_source(text: str) -> str:
    """A message without the lines of a grammar that the client has not written, and the place in them."""
    said = _SOURCE_LINE.split(text, maxsplit=1)[0]
    return said.rpartition("failed to compile JSON schema: ")[2]


def _one_line(text: str) -> str:
    return " ".join(text.split())[:MOST_SAID] or "it cannot be compiled"
