"""What a request says its output must look like, and refusing what cannot be enforced before the request is queued: in
the API process, which has grammars compiled in a sandbox."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeVar

import msgspec
import structlog

from engine.contracts.config import ConstraintConfig
from engine.contracts.constraint import CallsGrammar, Grammar, GrammarKind
from engine.service.errors import ApiError, bad_request
from engine.service.grammar_child import Verdict
from engine.service.protocol import GenerationRequest, StructuredOutputs
from engine.service.sandbox.process import SandboxEnded

T = TypeVar("T")
MOST_WAITING = 64
"""Grammars that may wait to be compiled."""

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of a schema with schemas by a name."""
_FIXED = ("const", "enum", "pattern", "required")
"""Keywords of a schema with texts that its masks follow character by character, also within lists and objects."""
_TEXT = r'"(?:[^"\\\n]|\\.)*+"?'
_LITERALS = {
    "lark": re.compile(rf"{_TEXT}|/(?:[^/\\\n]|\\.)++/?"),
    "gbnf": re.compile(rf"{_TEXT}|\[(?:[^\]\\\n]|\\.)*+\]?"),
}
"""Texts and regular expressions of a grammar, by its kind. One that does not end goes on to the end of its line: what
has been looked at is not looked at again."""

log = structlog.get_logger("engine.grammars")


def grammar_of(options: GenerationRequest) -> tuple[str, Grammar] | None:
    """What a request's output must look like, and the field that says it. Raises :class:`ApiError` ``invalid`` where
    several do, or one says nothing that can be understood."""
    found = [*_asked(options)]
    if len(found) > 1:
        names = " and ".join(param for param, _ in found)
        raise bad_request(f"Expected one description of the output, got {names}.", found[1][0])
    if found and options.min_tokens:
        raise bad_request("min_tokens cannot be combined with a grammar, which ends the output.", "min_tokens")
    return found[0] if found else None


def _asked(options: GenerationRequest) -> Iterator[tuple[str, Grammar]]:
    if (form := options.response_format) is not None:
        if form.type == "json_object":
            schema = _schema_text(form.schema, "response_format.schema")
            yield options.format_field, Grammar("json_schema", schema) if schema else Grammar("json_object")
        elif form.type == "json_schema":
            inner = _present(form.json_schema, "response_format.json_schema")
            schema = _schema_text(inner.schema, options.schema_field)
            yield options.format_field, Grammar("json_schema", schema) if schema else Grammar("json_object")
        elif form.type == "regex":
            yield options.format_field, Grammar("regex", _present(form.pattern, "response_format.pattern"))
        elif form.type == "grammar":
            yield options.format_field, Grammar("lark", _present(form.grammar, "response_format.grammar"))
    yield from _structured("structured_outputs", options.structured_outputs or StructuredOutputs())
    guided = StructuredOutputs(options.guided_json, options.guided_regex, options.guided_choice, options.guided_grammar)
    yield from _structured("guided", guided)
    if options.json_schema is not None:
        yield "json_schema", Grammar("json_schema", _schema_text(options.json_schema, "json_schema"))
    if options.grammar:
        yield "grammar", Grammar("gbnf", options.grammar)


def _structured(name: str, asked: StructuredOutputs) -> Iterator[tuple[str, Grammar]]:
    """vLLM's spelling."""
    at = f"{name}_" if name == "guided" else f"{name}."
    if asked.json is not None:
        yield f"{at}json", Grammar("json_schema", _schema_text(asked.json, f"{at}json"))
    if asked.regex is not None:
        yield f"{at}regex", Grammar("regex", asked.regex)
    if asked.choice is not None:
        if not asked.choice or "" in asked.choice:
            raise bad_request(f"{at}choice: expected at least one text, none of them empty.", f"{at}choice")
        yield f"{at}choice", Grammar("choice", msgspec.json.encode(asked.choice).decode())
    if asked.grammar is not None:
        yield f"{at}grammar", Grammar(_notation(asked.grammar), asked.grammar)
    if asked.json_object:
        yield f"{at}json_object", Grammar("json_object")


def _notation(text: str) -> GrammarKind:
    """Rules are ``name: ...`` in Lark, ``name ::= ...`` in GBNF."""
    return "gbnf" if "::=" in text else "lark"


def _present(value: T | None, param: str) -> T:
    if not value:
        raise bad_request(f"Missing required field {param!r}.", param)
    return value


def _schema_text(schema: Mapping[str, Any] | bool | str | None, param: str) -> str:
    """JSON text; empty for none. Some clients send the schema as text."""
    if schema is None:
        return ""
    try:
        if isinstance(schema, str):
            schema = msgspec.json.decode(schema)
            if not isinstance(schema, Mapping | bool):
                raise bad_request(f"{param}: expected a JSON Schema, which is an object.", param)
        return msgspec.json.encode(schema).decode()
    except msgspec.DecodeError as error:
        raise bad_request(f"{param} is not valid JSON: {error}.", param) from None
    except RecursionError:
        raise bad_request(f"{param} is nested too deeply.", param) from None


class GrammarSandbox(Protocol):
    """What compiles grammars; see :class:`engine.service.grammar_worker.GrammarWorker`."""

    async def verdict(self, grammar: Grammar, cpu_s: float) -> Verdict: ...

    def close(self) -> None: ...


class GrammarChecks:
    """Has grammars compiled to refuse those that cannot be enforced. Use on the event loop's thread only."""

    def __init__(self, compiler: GrammarSandbox | None, config: ConstraintConfig | None = None) -> None:
        self._compiler = compiler
        self._config = config or ConstraintConfig()
        self._waiting = 0
        self._known: OrderedDict[Grammar, str] = OrderedDict()
        """Why one is refused; empty: it is not."""

    async def check(self, grammar: Grammar, param: str) -> None:
        """Raises :class:`ApiError` ``invalid`` for a grammar that cannot be enforced or takes too long."""
        if self._compiler is None:
            raise bad_request("This server has no plugin that follows grammars.", param, "unsupported_parameter")
        why = self._known.get(grammar)
        if why is None:
            why = too_large(grammar, self._config) or await self._compiled(self._compiler, grammar)
            self._known[grammar] = why
            if len(self._known) > self._config.max_cached:
                self._known.popitem(last=False)
        if why:
            raise bad_request(f"{param}: {why[:1].upper()}{why[1:]}.".replace("..", "."), param, "invalid_grammar")

    async def _compiled(self, compiler: GrammarSandbox, grammar: Grammar) -> str:
        """Why it is refused."""
        if self._waiting >= MOST_WAITING:
            raise ApiError("overloaded", "Too many grammars wait already.", code="queue_full", retry_after_s=1)
        self._waiting += 1
        try:
            verdict = await compiler.verdict(grammar, self._config.compile_s)
        except SandboxEnded as error:
            verdict = Verdict(str(error), is_fault=True)
        finally:
            self._waiting -= 1
        if verdict.is_fault:  # this request's failure, nobody else's
            log.error("grammar not compiled", error=verdict.words)
            raise ApiError("failed", "The server failed to compile the grammar.", code="internal_error")
        return verdict.words

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()


def too_large(grammar: Grammar, limits: ConstraintConfig) -> str:
    """Which limit a grammar is beyond; empty: none. Optional properties of a schema cost their square."""
    size = len(grammar.text.encode())
    if size > limits.max_bytes:
        return f"it has {size} bytes, at most {limits.max_bytes} are taken (constraint.max_bytes)"
    schemas: tuple[Any, ...] = ()
    longest = len(grammar.text) if grammar.kind == "regex" else 0
    if literals := _LITERALS.get(grammar.kind):
        longest = max((len(found[0]) - 2 for found in literals.finditer(grammar.text)), default=0)
    elif grammar.kind == "choice":
        longest = max(map(len, msgspec.json.decode(grammar.text)), default=0)
    elif grammar.kind == "json_schema":
        schemas = (msgspec.json.decode(grammar.text),)
    elif grammar.kind == "calls":
        calls = msgspec.json.decode(grammar.text, type=CallsGrammar)
        schemas = (*calls.schemas, calls.otherwise)
    counts, deepest = {"properties": 0, "enum": 0}, 0
    left: list[tuple[Any, int, bool]] = [(schema, 1, False) for schema in schemas]
    while left:
        value, depth, is_fixed = left.pop()
        deepest = max(deepest, depth)
        if isinstance(value, list):
            left += [(each, depth + 1, is_fixed) for each in value]
        elif is_fixed:
            texts = (value,) if isinstance(value, str) else value if isinstance(value, dict) else ()
            longest = max(longest, *map(len, texts), 0)
            left += [(each, depth + 1, True) for each in value.values()] if isinstance(value, dict) else ()
        elif isinstance(value, dict):
            for key, inner in value.items():
                if key in counts:
                    counts[key] += len(inner) if isinstance(inner, dict | list) else 0
                if key in _BY_NAME and isinstance(inner, dict):  # what looks like keywords there are names
                    longest = max(longest, *map(len, inner), 0)
                    left += [(each, depth + 2, False) for each in inner.values()]
                else:
                    left.append((inner, depth + 1, key in _FIXED))
    found = (
        ("max_properties", counts["properties"], "properties"),
        ("max_enum", counts["enum"], "enum values"),
        ("max_depth", deepest, "levels"),
        ("max_text", longest, "characters in one text or regular expression"),
    )
    for name, count, what in found:
        if count > (most := getattr(limits, name)):
            return f"it has {count} {what}, at most {most} are taken (constraint.{name})"
    return ""
