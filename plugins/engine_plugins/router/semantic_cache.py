"""Router ``semantic_cache``: as ``response_cache``, and a question asked in another form gets the same answer.

Only the last turn of a conversation may differ. Everything else that shapes the answer must be equal: tenant, model and
plan, system prompt and earlier turns, sampling, stops, format. Of the last turn the content words must be equal, in
order, digits and negations among them (:mod:`engine_plugins.router.wording`), so they are part of the key, and a lookup
takes the same time however much is stored. Then the cosine of the two turns' vectors, which slot ``embedder`` makes,
must reach ``router.min_similarity``: what words alone pass, it may still refuse, never the other way round.

A share of such requests is answered by an engine all the same: where the two answers do not agree, that was a false
hit. Once more than ``router.max_false`` of them are false, with 95 % confidence, similar questions are no longer
answered.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import msgspec
import structlog

from engine.contracts.config import between
from engine.contracts.provider import BuildContext
from engine.contracts.router import Answer, AnswerTally, ApiRequest, EngineView, Route
from engine.contracts.shares import share_interval
from engine_plugins.router.response_cache import (
    SHAPES_NOTHING,
    Entry,
    ResponseCacheConfig,
    ResponseCacheRouter,
    cache_key,
    gives,
)
from engine_plugins.router.wording import Vocabulary, content_words, why_never

INDEX_BYTES = 256
"""What an entry of the index costs besides its vector."""
VECTOR_BYTES = array("d").itemsize
_encode = msgspec.msgpack.Encoder(order="deterministic").encode


@dataclass(frozen=True)
class SemanticCacheConfig(ResponseCacheConfig):
    """Stored answers to questions that say the same."""

    min_similarity: float = 0.5
    """Least cosine of the vectors of two questions, -1 to 1, where 1 is the same direction. The words must be equal
    besides: no value makes this alone decide."""
    max_chars: int = 200
    """Longer questions are compared with equal ones alone; 10,000 at most: nothing else happens meanwhile."""
    sampled: bool = False
    """Whether requests with a ``temperature`` above 0, which then have a ``seed``, get the answers to similar ones."""
    synonyms: dict[str, list[str]] = field(default_factory=dict)
    """For a word, others that mean it, of one word or several: ``{refund: [money back]}``."""
    ignored_words: list[str] = field(default_factory=list)
    """Further words that say nothing: ``[your]``, where questions are about one shop."""
    audit: float = 0.05
    """Share of the requests with a similar one stored that an engine answers all the same, 0 to 1."""
    max_false: float = 0.05
    """Share of audits that may fail, 0 to 1."""
    agreement: float = 0.5
    """Two answers agree that share so many of their tokens, 0 to 1: twice those in both, over the tokens of both."""

    def __post_init__(self) -> None:
        super().__post_init__()
        between("router.min_similarity", self.min_similarity, -1.0, 1.0)
        between("router.max_chars", self.max_chars, 1, 10_000)
        for name in ("audit", "max_false", "agreement"):
            between(f"router.{name}", getattr(self, name), 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Similar:
    """The question that was answered, of all that have the same words and everything else equal."""

    key: bytes
    """Of its answer."""
    vector: Sequence[float]


log = structlog.get_logger("engine.semantic_cache")


@dataclass(slots=True)
class Audit:
    """What came of comparing."""

    max_false: float
    audits: int = 0
    false_hits: int = 0
    suspended: bool = False
    """For good: what is served changes only with a restart."""

    def add(self, agrees: bool) -> None:
        self.audits += 1
        self.false_hits += not agrees
        self.suspended = self.suspended or self.rate[0] > self.max_false

    @property
    def rate(self) -> tuple[float, float]:
        """0 to 1 where nothing was audited."""
        return share_interval(self.false_hits, self.audits) if self.audits else (0.0, 1.0)


class SemanticCacheRouter:
    """The plugin: an index of questions over the answers of a ``response_cache``, which answers equal requests."""

    def __init__(
        self, config: SemanticCacheConfig, context: BuildContext, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._vocabulary = Vocabulary(config.synonyms, frozenset(config.ignored_words))
        self._embedder = context.embedder()
        self._exact = ResponseCacheRouter(config, context, clock)
        self._index: OrderedDict[bytes, Similar] = OrderedDict()
        """By :func:`question_key`, the least recently used first."""
        self._entry_bytes = INDEX_BYTES + self._embedder.dim * VECTOR_BYTES
        self._most = max(1, min(config.max_entries, config.max_bytes // self._entry_bytes))
        self._audit = Audit(config.max_false)
        self._similar_hits = 0

    def _add_audit(self, agrees: bool) -> None:
        was = self._audit.suspended
        self._audit.add(agrees)
        if self._audit.suspended and not was:
            found = self._audit
            log.warning(
                "similar questions are no longer given stored answers, until a restart",
                audits=found.audits, false_hits=found.false_hits, at_least=round(found.rate[0], 4),
                max_false=found.max_false,
            )  # fmt: skip

    def place(self, request: ApiRequest, fleet: tuple[EngineView, ...]) -> Route:
        route = self._exact.place(request, fleet)
        if isinstance(route, Answer) or self._audit.suspended or self.is_audited(request):
            return route
        if (key := self._key(request)) is None or (found := self._find(key, request)) is None:
            return route
        entry, similarity = found
        return replace(entry.answer, reason=f"stored answer to a similar question, cosine {similarity:.2f}")

    def begun(self, request: ApiRequest, engine_id: str) -> None:
        self._exact.begun(request, engine_id)

    def finished(self, request: ApiRequest, answer: Answer) -> None:
        own = cache_key(request)
        key = None if self._exact.find(own) is not None else self._key(request)
        if key is None:
            self._exact.finished(request, answer)
            return
        found, similar = self._find(key, request), self._index.get(key)
        if found is not None and similar is not None:
            stored = found[0].answer
            if self.is_audited(request):
                self._add_audit(agree(answer, stored, self._config.agreement))
            elif gives(answer, stored):
                self._similar_hits += 1
                self._index.move_to_end(key)
                self._exact.use(similar.key)
                return
        self._exact.finished(request, answer)
        if found is None and self._exact.find(own) is not None and all(map(ended_by_itself, answer.choices)):
            self._remember(key, Similar(own, self._vector(request)))

    def tally(self) -> AnswerTally:
        audit, exact = self._audit, self._exact.tally()
        return replace(
            exact,
            bytes=exact.bytes + len(self._index) * self._entry_bytes,
            similar_hits=self._similar_hits,
            audits=audit.audits,
            false_hits=audit.false_hits,
            false_rate=audit.rate,
            suspended=audit.suspended,
        )

    def is_audited(self, request: ApiRequest) -> bool:
        """Always the same of a request, whenever it is asked."""
        return zlib.crc32(request.request_id.encode()) < self._config.audit * 2**32

    def _key(self, request: ApiRequest) -> bytes | None:
        """``None`` where only an equal request will do."""
        sampling, question = request.sampling, request.question
        if question is None or len(request.prompts) != 1 or request.echo:
            return None
        if sampling.temperature != 0.0 and not (self._config.sampled and sampling.seed is not None):
            return None
        if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
            return None  # those of another prompt are others
        if why_never(question.text, self._config.max_chars):
            return None
        words = content_words(question.text, self._vocabulary)
        return question_key(request, words) if words else None

    def _find(self, key: bytes, request: ApiRequest) -> tuple[Entry, float] | None:
        """The answer to a similar question, and how similar that is."""
        similar = self._index.get(key)
        entry = None if similar is None else self._exact.find(similar.key)
        if similar is None or entry is None:
            return None
        if any(len(choice["tokens"]) > request.sampling.max_tokens for choice in entry.answer.choices):
            return None  # a longer prompt leaves less room
        similarity = sum([a * b for a, b in zip(self._vector(request), similar.vector, strict=True)])
        return (entry, similarity) if similarity >= self._config.min_similarity else None

    def _vector(self, request: ApiRequest) -> Sequence[float]:
        assert request.question is not None
        return array("d", self._embedder.embed(request.question.text))

    def _remember(self, key: bytes, similar: Similar) -> None:
        self._index[key] = similar
        self._index.move_to_end(key)
        while len(self._index) > self._most:
            self._index.popitem(last=False)


def question_key(request: ApiRequest, words: Sequence[str]) -> bytes:
    """SHA-256 over the whole request but its last turn, of which ``words`` count; what a later version adds to requests
    is part of it by default. Of the limit of the output only what the client asked for: otherwise it is what the prompt
    leaves."""
    assert request.question is not None
    left_out = {*SHAPES_NOTHING, "prompts", "sampling", "fields"}
    shaping: dict[str, Any] = {f.name: getattr(request, f.name) for f in fields(request) if f.name not in left_out}
    sampling = msgspec.to_builtins(request.sampling, str_keys=True)
    shaping["sampling"] = {name: value for name, value in sampling.items() if name != "max_tokens"}
    shaping["fields"] = {name: value for name, value in request.fields.items() if name not in SHAPES_NOTHING}
    shaping["rest"], shaping["words"] = request.question.rest, words
    return hashlib.sha256(_encode(shaping)).digest()


def ended_by_itself(choice: Any) -> bool:
    """One that was cut off goes on elsewhere for another limit."""
    return bool(choice.get("finish_reason") == "stop")


def agree(answer: Answer, other: Answer, least: float) -> bool:
    """Whether all choices share so many tokens, wherever they stand: a judge of wording, not of meaning."""
    return all(
        overlap(one["tokens"], two["tokens"]) >= least for one, two in zip(answer.choices, other.choices, strict=True)
    )


def overlap(one: Sequence[int], two: Sequence[int]) -> float:
    """Twice the tokens in both, over the tokens of both: 0 to 1."""
    both = (Counter(one) & Counter(two)).total()
    return 2 * both / max(1, len(one) + len(two))
