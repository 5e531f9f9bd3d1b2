"""What guards of ``router=semantic_cache`` pass: pairs of questions that ask the same, and pairs that do not.

``python -m tools.benchmarks.semantic_cache``: two tables over ``question_pairs.tsv``, written by hand and from
templates: 12 and 12 pairs of the kinds that are known to fail (``first``), 200 and more of each (``own``), and 48 that
were written against what the guards leave out (``adversarial``). Then how long a lookup takes. ``--embedder
NAME=FOLDER[:TENSOR]`` adds a table of token vectors, as ``embedder=static`` reads it.

``--url URL`` asks a server instead, which runs with ``router=semantic_cache router.audit=0``: each question once,
again, and in another form; prints how long the first token took.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from pathlib import Path
from statistics import median, quantiles
from urllib.parse import urlsplit

from engine.assembly.model_config import bundled_dir
from engine.contracts.embedder import Embedder
from engine.contracts.request import SamplingParams
from engine.contracts.router import Answer, ApiRequest, EngineView, Question
from engine.testing.context import build_context
from engine_plugins.embedder.ngrams import NgramsConfig, NgramsEmbedder
from engine_plugins.embedder.static import StaticConfig, StaticEmbedder
from engine_plugins.router.response_cache import ResponseCacheConfig, ResponseCacheRouter
from engine_plugins.router.semantic_cache import SemanticCacheConfig, SemanticCacheRouter
from engine_plugins.router.wording import NEGATIONS, NO_VOCABULARY, Vocabulary, content_words, is_number, why_never

PAIRS = Path(__file__).with_name("question_pairs.tsv")
CONFIGURED = Vocabulary(
    {
        "purchase": ["buy"], "delete": ["remove"], "price": ["cost"], "begin": ["start"], "film": ["movie"],
        "refund": ["money back"], "lift": ["elevator"], "parcel": ["package"],
    },
    frozenset({"your"}),
)  # fmt: skip
"""As somebody may configure it: half of the synonyms of the pairs, and one word that says nothing."""
MOST_CHARS = 200
COLUMNS = (("first", True), ("first", False), ("own", True), ("own", False), ("adversarial", False))


@dataclass(frozen=True, slots=True)
class Pair:
    source: str
    same: bool
    kind: str
    first: str
    second: str


def read_pairs() -> list[Pair]:
    rows = [line.split("\t") for line in PAIRS.read_text("utf-8").splitlines()]
    return [Pair(source, verdict == "same", kind, first, second) for source, verdict, kind, first, second in rows]


def cosine(embedder: Embedder, pair: Pair) -> float:
    one, two = embedder.embed(pair.first), embedder.embed(pair.second)
    return sum([a * b for a, b in zip(one, two, strict=True)])


def is_plain(word: str) -> bool:
    return not is_number(word) and word not in NEGATIONS


def words_of(pair: Pair, vocabulary: Vocabulary, keep: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    one, two = (content_words(text, vocabulary) for text in (pair.first, pair.second))
    return [word for word in one if keep(word)], [word for word in two if keep(word)]


def equal_words(pair: Pair, vocabulary: Vocabulary = NO_VOCABULARY, keep: Callable[[str], bool] = is_plain) -> bool:
    one, two = words_of(pair, vocabulary, keep)
    return one == two


def equal_sets(pair: Pair, keep: Callable[[str], bool] = is_plain) -> bool:
    one, two = words_of(pair, NO_VOCABULARY, keep)
    return sorted(one) == sorted(two)


def may(pair: Pair) -> bool:
    return not why_never(pair.first, MOST_CHARS) and not why_never(pair.second, MOST_CHARS)


def every(word: str) -> bool:
    return True


WORD_GUARDS: tuple[tuple[str, Callable[[Pair], bool]], ...] = (
    ("content words, in any order", equal_sets),
    ("+ order", equal_words),
    ("+ order, digits", lambda p: equal_words(p, keep=lambda word: word not in NEGATIONS)),
    ("+ order, negation", lambda p: equal_words(p, keep=lambda word: not is_number(word))),
    ("all words: order, digits, negation", lambda p: equal_words(p, keep=every)),
    ("all (words, and what is never compared)", lambda p: may(p) and equal_words(p, keep=every)),
    ("all, with synonyms and `your` ignored", lambda p: may(p) and equal_words(p, CONFIGURED, every)),
)


def row(name: str, pairs: Iterable[Pair], passes: Callable[[Pair], bool]) -> str:
    cells = []
    for source, same in COLUMNS:
        some = [pair for pair in pairs if (pair.source, pair.same) == (source, same)]
        cells.append(f"{sum(map(passes, some))} / {len(some)}")
    return f"| {name} | {' | '.join(cells)} |"


def print_guards(pairs: Sequence[Pair], embedders: dict[str, Embedder]) -> None:
    print(f"| guard | {' | '.join(f'{source}: {same} hits'.lower() for source, same in COLUMNS)} |")
    print("|---" * (1 + len(COLUMNS)) + "|")
    for name, embedder in embedders.items():
        scores = {id(pair): cosine(embedder, pair) for pair in pairs}
        for least in (0.95, 0.9, 0.8, 0.7):
            print(row(f"{name}: cosine >= {least} alone", pairs, lambda p, s=scores, t=least: s[id(p)] >= t))
    for name, passes in WORD_GUARDS:
        print(row(name, pairs, passes))
    everything = WORD_GUARDS[-2][1]
    for name, embedder in embedders.items():
        scores = {id(pair): cosine(embedder, pair) for pair in pairs}
        for least in (0.3, 0.5, 0.7, 0.8):
            print(
                row(
                    f"all, and {name}: cosine >= {least}",
                    pairs,
                    lambda p, s=scores, t=least: everything(p) and s[id(p)] >= t,
                )
            )


def print_kinds(pairs: Sequence[Pair]) -> None:
    everything = WORD_GUARDS[-2][1]
    print("\n| kind | pairs | ask the same | pass all guards |\n|---|---|---|---|")
    for same in (True, False):
        for kind in sorted({pair.kind for pair in pairs if pair.same == same}):
            some = [pair for pair in pairs if (pair.kind, pair.same) == (kind, same)]
            print(f"| {kind} | {len(some)} | {'yes' if same else 'no'} | {sum(map(everything, some))} |")
    for pair in pairs:
        if not pair.same and everything(pair):
            print(f"passes and should not: {pair.first} | {pair.second}")


def question(text: str, index: int = 0) -> ApiRequest:
    return ApiRequest(
        request_id=f"r{index}",
        kind="chat",
        model="m",
        prompts=(tuple(text.encode()),),
        n=1,
        sampling=SamplingParams(temperature=0.0, max_tokens=256),
        cache_salt="",
        stop=(),
        stream=False,
        echo=False,
        question=Question(text, "You are helpful."),
    )


def print_times(entries: int) -> None:
    """Of the plugin alone: what it adds to a request, in microseconds of this thread's CPU."""
    context = build_context()
    context = replace(context, embedder=lambda: NgramsEmbedder(NgramsConfig(), context))
    size = {"max_entries": entries, "max_bytes": 1 << 30}
    cached = SemanticCacheRouter(SemanticCacheConfig(audit=0.0, **size), context)
    exact = ResponseCacheRouter(ResponseCacheConfig(**size), context)
    answer = Answer(({"tokens": tuple(range(64)), "logprobs": (), "finish_reason": "stop"},))
    fleet = (EngineView("default", "m", alive=True, running=0, waiting=0, kv_used=0.0),)
    for i in range(entries):
        for router in (cached, exact):
            router.finished(question(f"How do I repair part {i} of engine {i * 7}?", i), answer)
    shown = f"{cached.tally().entries:,} entries of {NgramsConfig().dim} numbers"
    print(f"\n| call, {shown} | CPU us, median | CPU us, P99 of 2,000 |\n|---|---|---|")
    for name, router, text, hit in (
        ("response_cache: miss", exact, "How do I paint part {0} of engine {0}?", False),
        ("semantic_cache: miss", cached, "How do I paint part {0} of engine {0}?", False),
        ("semantic_cache: similar hit", cached, "please, how to repair part {0} of engine {1}", True),
        ("semantic_cache: equal hit", cached, "How do I repair part {0} of engine {1}?", True),
    ):
        times = []
        for i in range(2000):
            asked = question(text.format(i, i * 7), i)
            begun = time.thread_time()
            route = router.place(asked, fleet)
            times.append((time.thread_time() - begun) * 1e6)
            assert isinstance(route, Answer) == hit, route
        print(f"| {name} | {median(times):.0f} | {quantiles(times, n=100)[98]:.0f} |")


def first_token_ms(url: str, text: str) -> tuple[float, str]:
    """Of a stream, and how it says that it was stored; empty where it does not."""
    host = urlsplit(url)
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "stream": True}
    connection = HTTPConnection(host.hostname or "", host.port)
    begun = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply, first, data = connection.getresponse(), 0.0, b""
    assert reply.status == 200, reply.read()
    while line := reply.readline():
        data += line
        if not first and b'"content":"' in line and b'"content":""' not in line:
            first = (time.perf_counter() - begun) * 1e3
    connection.close()
    reason = re.search(rb'"route":\{"reason":"([^"]*)', data)
    return first, reason[1].decode() if reason else ""


def print_server(url: str) -> None:
    """Questions of which a model needs to know nothing: how long it takes is asked."""
    functions = ("dump", "load", "open", "sum")
    names = [f"{module}.{function}" for module in ("json", "os", "csv", "math") for function in functions]
    stamp, times = int(time.time()), dict[str, list[float]](miss=[], equal=[], similar=[])
    for name in names:
        for kind, text in (
            ("miss", f"How do I call {name} with {stamp % 9973} arguments in a program?"),
            ("equal", f"How do I call {name} with {stamp % 9973} arguments in a program?"),
            ("similar", f"please, how to call {name} with {stamp % 9973} arguments in a program"),
        ):
            ms, reason = first_token_ms(url, text)
            assert (kind == "miss") == (reason == "") and kind in (reason + " miss"), (kind, reason)
            times[kind].append(ms)
    print("| answer | TTFT, median (ms) | of a miss |\n|---|---|---|")
    for kind, found in times.items():
        print(f"| {kind} | {median(found):.1f} | {median(found) / median(times['miss']):.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=10_000, help="stored while lookups are timed")
    parser.add_argument("--url", help="a server to ask")
    parser.add_argument("--embedder", action="append", default=[], metavar="NAME=FOLDER[:TENSOR]")
    flags = parser.parse_args()
    if flags.url:
        print_server(flags.url)
        return
    context, pairs = build_context(), read_pairs()
    embedders: dict[str, Embedder] = {"ngrams": NgramsEmbedder(NgramsConfig(), context)}
    for given in (f"bundled={bundled_dir()}:model.embed_tokens.weight", *flags.embedder):
        name, _, place = given.partition("=")
        folder, _, tensor = place.partition(":")
        embedders[name] = StaticEmbedder(StaticConfig(path=folder, tensor=tensor or "embeddings"), context)
    print_guards(pairs, embedders)
    print_kinds(pairs)
    print_times(flags.entries)


if __name__ == "__main__":
    main()
