"""Grammars that are made to be slow: what becomes of each, and of a stream beside it.

One client reads streams while another sends a grammar after the other: large, deep, ambiguous, with counts, literals
and alternatives by the thousand, some of them wrong. Each is either followed or ends its own request with a reason.
Then many different grammars come at once, and each is answered.

Bars: the server answers the canary as before; the mean and the median ITL of the streams are at most 1.1 times those
beside as many plain requests.

    python -m tools.attack.grammars
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import mean
from typing import Any

from tools.attack.client import CHAT, Answer, Connection, ask, request
from tools.attack.harness import QUESTION, Row, Target, arguments, percentile, run, target_of

MOST_RATIO = 1.1
ASK = QUESTION | {"max_tokens": 48, "temperature": 1, "seed": 1}
STREAM = (
    QUESTION
    | {"max_tokens": 600, "temperature": 1, "seed": 1, "ignore_eos": True, "skip_special_tokens": False}
    | {"stream": True}
)
OTHER = "127.0.0.2"
"""The address of whoever sends grammars."""
Bombs = Iterator[tuple[str, dict[str, Any]]]
"""A name and the fields of a request."""


def bombs() -> Bombs:
    """Every grammar, by kind."""
    for name, schema in schemas():
        yield f"schema: {name}", {"response_format": schema_format(schema)}
    for name, regex in regexes():
        yield f"regex: {name}", {"structured_outputs": {"regex": regex}}
    for name, grammar in grammars():
        yield f"grammar: {name}", {"structured_outputs": {"grammar": grammar}}
    for name, choices in alternatives():
        yield f"choice: {name}", {"structured_outputs": {"choice": choices}}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "bomb", "strict": True, "schema": schema}}


def schemas() -> Iterator[tuple[str, Any]]:
    text, number = {"type": "string"}, {"type": "integer"}
    yield "1,000 optional properties", _properties({f"p{i}": text for i in range(1000)})
    yield "500 required properties", _properties({f"p{i}": text for i in range(500)}, required=True)
    yield "names of 2,000 characters", _properties({f"{i}" + "x" * 2000: number for i in range(30)}, required=True)
    yield "one literal of 60,000 characters", {"const": "ab" * 30_000}
    yield "a literal object with a name of 60,000 characters", {"const": {"ab" * 30_000: 1}}
    yield "a literal list with a text of 60,000 characters", {"const": ["ab" * 30_000]}
    yield "literal lists with texts of 60,000 characters", {"enum": [["ab" * 30_000], ["ac" * 30_000]]}
    yield (
        "a required name of 60,000 characters",
        {"type": "object", "required": ["ab" * 30_000], "additionalProperties": number},
    )
    yield "5,000 literals", {"enum": [f"literal number {i} of many" for i in range(5000)]}
    yield "5,000 numbers", {"enum": list(range(0, 5000 * 7919, 7919))}
    yield "200 levels of objects", _nested(lambda inner: _properties({"a": inner}, required=True), 200)
    yield "60 levels of lists", _nested(lambda inner: {"type": "array", "items": inner}, 60)
    yield "10 levels of anyOf", _nested(lambda inner: {"anyOf": [_properties({"a": inner}), inner]}, 10)
    yield "10 levels of allOf", _nested(lambda inner: {"allOf": [inner, _properties({"a": inner})]}, 10)
    yield "300 alternatives that begin alike", {"anyOf": [_alike(i) for i in range(300)]}
    yield "oneOf of 100", {"oneOf": [_properties({f"p{i}": number}, required=True) for i in range(100)]}
    yield "a list of 100,000", {"type": "array", "items": number, "minItems": 100_000, "maxItems": 100_000}
    yield "lists of lists of 1,000", _nested(lambda inner: _list(inner, 1000), 4)
    yield "a text of 100,000 characters", {"type": "string", "minLength": 100_000, "maxLength": 100_000}
    yield "50 texts of 1 to 2,000", _properties({f"p{i}": _long(2000) for i in range(50)}, required=True)
    yield "a pattern of counts", {"type": "string", "pattern": "^([a-z]{1,500}[0-9]{1,500}){1,50}$"}
    yield "100 patterns", {"anyOf": [{"type": "string", "pattern": f"^.*{i}.*[a-z]+$"} for i in range(100)]}
    yield "patterns that must all hold", {"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghij"]}
    yield "a tree that refers to itself", _tree({"$ref": "#"}, 10)
    yield "a reference to itself alone", {"$ref": "#"}
    yield (
        "a circle of references",
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    )
    yield "a chain of 500 references", _chain(500)
    yield "references that double", _doubling(30)
    yield "a reference to nothing", {"$ref": "#/$defs/missing"}
    yield "a reference to another place", {"$ref": "file:///etc/passwd"}
    yield "any keys by patterns", {"type": "object", "patternProperties": {f"^.*k{i}.*$": number for i in range(50)}}
    yield "a number between two of 300 digits", {"type": "integer", "minimum": 10**299, "maximum": 10**300}
    yield "a multiple of 1e-300", {"type": "number", "multipleOf": 1e-300}
    yield "a multiple of 7919 in 1e15", {"type": "integer", "multipleOf": 7919, "maximum": 10**15}
    yield (
        "every format",
        {"anyOf": [{"type": "string", "format": f} for f in ("date-time", "email", "uri", "uuid", "ipv6")]},
    )
    yield "nothing at all", {"not": {}}
    yield "false", False
    yield "minimum above maximum", {"type": "integer", "minimum": 5, "maximum": 4}
    yield "a type of no name", {"type": "strange"}
    yield "100 required names that no property has", {"type": "object", "required": [f"r{i}" for i in range(100)]}
    yield "names with quotes and line ends", _properties({'"\\\n' + chr(0x1F600) + str(i): text for i in range(50)})


def regexes() -> Iterator[tuple[str, str]]:
    yield "stars within stars", "((a*)*)*b"
    yield "counts of counts", "((a{1,100}){1,100}){1,100}"
    yield "one count of 100,000", "a{100000}"
    yield "counts of a text", "((ab){200}){400}"
    yield "counts of a text after any letters", "[a-z]{1,3}((ab){200}){400}"
    yield "a count behind any", "(a|b)*a(a|b){18}"
    yield "any characters between words", ".*foo.*bar.*baz.*qux.*"
    yield "500 words", "(" + "|".join(f"word{i}x*" for i in range(500)) + ")+"
    yield "all of Unicode by classes", "[\\p{L}\\p{N}\\p{P}]{1,300}[\\p{Lu}]"
    yield "letters of 200 scripts", "[^\\x00-\\x7f]{1,200}"
    yield "200 groups", "(" * 200 + "a" + ")" * 200
    yield "2,000 classes", "[a-y]" * 2000
    yield "an address of mail", "[a-z0-9._%+-]{1,64}@([a-z0-9-]{1,63}\\.){1,8}[a-z]{2,63}"
    yield "looking ahead", "(?=.*a)(?=.*b).*"
    yield "a reference back", "(a+)\\1"
    yield "an open bracket", "[a-"
    yield "nothing", "[^\\s\\S]"
    yield "30,000 characters", "abc" * 10_000


def grammars() -> Iterator[tuple[str, str]]:
    yield "sums of sums", 'start: e\ne: e "+" e | e "*" e | "(" e ")" | /[0-9]+/'
    yield "rules of nothing", "start: a\na: a a | b\nb: | a"
    yield "itself alone", "start: start"
    yield "an empty word for ever", 'start: x*\nx: "" | "a"?'
    yield "two ways for each letter", 'start: (a | b)+\na: "x" | "x" a\nb: "x" | b "x"'
    yield "nothing that ends", 'start: "a" start'
    yield "palindromes", 'start: "a" start "a" | "b" start "b" | "c"'
    yield "1,000 rules", "start: " + " | ".join(f"r{i}" for i in range(1000)) + "".join(_rule(i) for i in range(1000))
    yield "a chain of 1,000 rules", 'start: r0\nr1000: "x"' + "".join(f"\nr{i}: r{i + 1}" for i in range(1000))
    yield "rules that double", 'start: r0\nr40: "x"' + "".join(f"\nr{i}: r{i + 1} r{i + 1}" for i in range(40))
    yield "a count of 50,000", 'start: "ab"{50000}'
    yield "one text of 60,000 characters", f'start: "{"ab" * 30_000}"'
    yield "one expression of 60,000 characters", f"start: /{'ab' * 30_000}/"
    yield "one text of 60,000 characters, GBNF", f'root ::= "{"ab" * 30_000}"'
    yield "classes that do not end", "root ::= " + '["' * 60_000
    yield "texts one after the other", "start: " + " ".join(['"' + "ab" * 4000 + '"'] * 7)
    yield "terms that double", 'start: A16\nA0: "ab"' + "".join(f"\nA{i + 1}: A{i} A{i}" for i in range(16))
    yield "words that are parts of words", "start: (A | B | C)+\nA: /a+/\nB: /a+b?/\nC: /(a|b)+/"
    yield "everything but", "start: /(?s:.*)/ END\nEND: /x{1,1000}/"
    yield "no grammar", "this is no grammar"
    yield "a rule that is missing", "start: missing"
    yield "no start", 'a: "b"'


def alternatives() -> Iterator[tuple[str, list[str]]]:
    yield "2,000 that begin alike", ["the same beginning of all " * 4 + str(i) for i in range(2000)]
    yield "20,000 short ones", [str(i) for i in range(20_000)]
    yield "five of 20,000 characters", [c * 20_000 for c in "abcde"]
    yield "each the beginning of the next", ["a" * i for i in range(1, 500)]
    yield "none", []


def _properties(properties: dict[str, Any], required: bool = False) -> dict[str, Any]:
    names = list(properties) if required else []
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def _nested(around: Any, levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = around(schema)
    return schema


def _list(items: Any, count: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": count, "maxItems": count}


def _long(most: int) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": most}


def _alike(i: int) -> dict[str, Any]:
    return _properties({"name": {"const": "the same beginning"}, "kind": {"const": i}}, required=True)


def _tree(node: Any, branches: int) -> dict[str, Any]:
    return _properties({f"branch{i}": node for i in range(branches)})


def _chain(count: int) -> dict[str, Any]:
    links: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": links | {f"d{count}": {"type": "integer"}}}


def _doubling(levels: int) -> dict[str, Any]:
    pairs: dict[str, Any] = {
        f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "minItems": 2, "items": False}
        for i in range(levels)
    }
    return {"$ref": "#/$defs/d0", "$defs": pairs | {f"d{levels}": {"type": "integer"}}}


def _rule(i: int) -> str:
    return f'\nr{i}: "rule {i} " r{(i + 1) % 1000} | "end {i}"'


@dataclass(slots=True)
class Beside:
    """A client that reads streams one after the other, and how long it waited for each token."""

    target: Target
    gaps_s: list[float] = field(default_factory=list)

    async def read(self) -> None:
        """Until cancelled."""
        while True:
            connection = await Connection.open(self.target)
            try:
                connection.writer.write(request(CHAT, STREAM))
                last, reply = None, await connection.head()
                if reply.status != 200:
                    raise ValueError(f"the stream beside was refused with {reply.status}")
                async for part in connection.parts(reply):
                    if b'"content":"' not in part:
                        continue
                    now = time.monotonic()
                    if last is not None:
                        self.gaps_s.append(now - last)
                    last = now
            finally:
                connection.close()


async def beside(target: Target, bodies: Sequence[dict[str, Any]]) -> tuple[list[Answer], list[list[float]]]:
    """What became of these requests, one after the other, and the gaps of a stream beside each, in seconds."""
    other = Beside(target)
    reading = asyncio.create_task(other.read())
    while not other.gaps_s and not reading.done():
        await asyncio.sleep(0.01)
    if reading.done():
        reading.result()
    answers, gaps_s = [], []
    for body in bodies:
        other.gaps_s = []
        answers.append(await ask(target, CHAT, ASK | body, source=OTHER))
        gaps_s.append(other.gaps_s)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return answers, gaps_s


async def attack(target: Target, at_once: int, rounds: int) -> list[Row]:
    """``at_once``: different grammars at the same time; ``rounds``: the others are sent so often."""
    names, bodies = zip(*bombs(), strict=True)
    answers: list[Answer] = []
    plain_s: list[float] = []
    gaps_s: dict[str, list[float]] = {name: [] for name in names}
    await beside(target, [{}] * 8)
    for _ in range(rounds):
        plain_s += chain.from_iterable((await beside(target, [{}] * len(bodies)))[1])
        answers, found_s = await beside(target, bodies)
        for name, new_s in zip(names, found_s, strict=True):
            gaps_s[name] += new_s
    rows = each(names, answers) + others(plain_s, gaps_s)
    rows.append(await crowd(target, at_once))
    held = await target.held()
    rows.append(Row("grammars: blocks", "afterwards", held or "all free", "all free", not held))
    alive = await target.same() and target.engine_pid == await target.engine()
    return [*rows, Row("grammars: the server", "afterwards", "as before" if alive else "changed", "as before", alive)]


def each(names: Sequence[str], answers: Sequence[Answer]) -> list[Row]:
    wrong = []
    for name, answer in zip(names, answers, strict=True):
        told = answer.ending == "whole" or (answer.ending in ("refused", "error") and answer.text)
        if not told or answer.status == 500:
            wrong.append(f"{name}: {answer.ending} {answer.status} {answer.text[:80]}")
    took = sorted(
        ((max(answer.at_s, default=0.0), name) for name, answer in zip(names, answers, strict=True)), reverse=True
    )
    slowest = ", ".join(f"{name} {seconds:.1f} s" for seconds, name in took[:4])
    tried = f"{len(names)} grammars"
    return [
        Row("grammars: each", tried, "; ".join(wrong) or _ends(answers), "followed, or a reason", not wrong),
        Row("grammars: the slowest", tried, slowest, "reported", None),
    ]


def others(plain_s: Sequence[float], gaps_s: Mapping[str, Sequence[float]]) -> list[Row]:
    """The gaps of streams beside plain requests, and beside each grammar."""
    rows = []
    all_s = list(chain.from_iterable(gaps_s.values()))
    tried = f"beside plain requests ({len(plain_s)} tokens), beside grammars ({len(all_s)})"
    for what, of in (("mean", mean), ("P50", _percentile(50)), ("P99", _percentile(99))):
        ratio = of(all_s) / of(plain_s)
        shown = f"{of(plain_s) * 1e3:.1f} ms, {of(all_s) * 1e3:.1f} ms: {ratio:.2f}"
        bar, held = ("reported", None) if what == "P99" else (f"<= {MOST_RATIO}", ratio <= MOST_RATIO)
        rows.append(Row(f"grammars: ITL of others, {what}", tried, shown, bar, held, measured=True))
    lost = sorted(((sum(of) - len(of) * mean(plain_s), name) for name, of in gaps_s.items()), reverse=True)
    shown = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for seconds, name in lost[:6])
    return [*rows, Row("grammars: most time lost by others", tried, shown, "reported", None)]


async def crowd(target: Target, count: int) -> Row:
    begun_s = time.monotonic()
    bodies = [ASK | {"max_tokens": 2, "response_format": schema_format(_different(i))} for i in range(count)]
    answers = await asyncio.gather(*(ask(target, CHAT, body, source=OTHER) for body in bodies))
    held = all(answer.ending == "whole" or answer.status in (429, 503) for answer in answers)
    shown = f"{_ends(answers)} in {time.monotonic() - begun_s:.1f} s"
    return Row("grammars: at once", f"{count} different ones", shown, "followed, or told to come again", held)


def _ends(answers: Sequence[Answer]) -> str:
    counted = Counter(f"{answer.ending} {answer.status}" for answer in answers)
    return ", ".join(f"{count} {end}" for end, count in sorted(counted.items()))


def _percentile(q: float) -> Callable[[Sequence[float]], float]:
    return lambda values: percentile(values, q)


def _different(i: int) -> dict[str, Any]:
    return _properties({f"name{i}_{j}": {"enum": [f"{i} {j} {k}" for k in range(5)]} for j in range(10)}, required=True)


async def main(options: argparse.Namespace) -> list[Row]:
    async with target_of(options) as target:
        return await attack(target, options.count, options.rounds)


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__, count=1000, rounds=3).parse_args(), main))
