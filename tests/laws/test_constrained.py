"""Laws of outputs that follow a grammar: each is of its grammar, and the same whatever drafts, overlaps, batches or
preempts; requests without a grammar beside them say what they say alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor

from engine import LLM
from engine.contracts.constraint import Grammar, GrammarError
from engine.contracts.request import EngineRequest, ReasoningTokens, SamplingParams
from engine.sampling.constrained import Constraints, Grammars
from engine.service.offline import Completion
from tests.selection import few

from .harness import VOCAB, Exact, assert_nothing_held, exact_engine, expected, random_requests, run
from .test_exact_swaps import FACTORS, Plugins, overrides, sets


class Toy:
    """A grammar of a number: which tokens are allowed depends on all tokens before."""

    def compile(self, grammar: Grammar) -> ToyMatcher:
        return ToyMatcher(int(grammar.text))


class ToyMatcher:
    def __init__(self, number: int) -> None:
        self._number = number
        self._taken: list[int] = []

    def allows(self, token: int) -> bool:
        return (token + 3 * sum(self._taken) + len(self._taken)) % 5 != self._number

    def advance(self, token: int) -> bool:
        if not self.allows(token):
            return False
        self._taken.append(token)
        return True

    def roll_back(self, count: int) -> None:
        del self._taken[len(self._taken) - count :]

    def fill(self, mask: Tensor) -> None:
        if self._number == 4 and len(self._taken) == 6:
            raise GrammarError("it is too hard")
        bits = torch.zeros(32 * len(mask), dtype=torch.int64)
        bits[:VOCAB] = torch.tensor([self.allows(token) for token in range(VOCAB)])
        words = (bits.view(-1, 32) << torch.arange(32)).sum(dim=1)
        mask.copy_(torch.where(words >= 2**31, words - 2**32, words))

    def forced(self) -> Sequence[int]:
        """Drafts: good ones, and wrong ones."""
        return [token for token in range(len(self._taken) % 3, VOCAB) if self.allows(token)][:2]


OPENS, CLOSES = 3, 5


def answer_of(reasoning: ReasoningTokens | None, output: Sequence[int]) -> list[int]:
    """What is no thought."""
    if reasoning is None or (reasoning.opens is not None and output[:1] != [reasoning.opens]):
        return list(output)
    thought = list(output[reasoning.opens is not None :])
    end = thought.index(reasoning.closes) if reasoning.closes in thought else len(thought)
    assert reasoning.budget is None or end <= reasoning.budget
    return thought[end + 1 :]


def constrained_engine(*overrides: str, **options: Any) -> Exact:
    grammars = Grammars(Toy(), 8)
    engine = exact_engine(*overrides, matcher_of=grammars.matcher_of, **options)
    width = engine.runner.tables.tokens.shape[1]
    engine.runner.tables.constraints = Constraints(grammars, VOCAB, min(16, width))
    return engine


THOUGHTS = (
    None, None, ReasoningTokens(CLOSES, budget=3), ReasoningTokens(CLOSES, OPENS, budget=0), ReasoningTokens(CLOSES)
)  # fmt: skip
"""By the number of a request: the prompt ends within a thought, or the output may begin one."""


def requests_of(seed: int, count: int) -> list[EngineRequest]:
    """Two of three are constrained, some greedy, some sampled; some think first, with a budget or as they like."""
    made = []
    for i, request in enumerate(random_requests(seed, count)):
        grammar = Grammar("regex", str(i % 4)) if i % 3 else None
        sampling = {"temperature": 1.0, "seed": i} if grammar and i % 2 else {"temperature": 0.0}
        params = SamplingParams(
            max_tokens=request.sampling.max_tokens, grammar=grammar, reasoning=THOUGHTS[i % len(THOUGHTS)], **sampling
        )
        made.append(EngineRequest(request.request_id, request.prompt, params, priority=request.priority))
    return made


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """What each request says without anything beside it."""
    found: dict[str, list[int]] = {}
    for request in requests_of(1, 14):
        engine = constrained_engine(*overrides(("static", "contiguous", "none", "false", "eager")))
        found |= run(engine.core, [request])
        engine.core.close()
    return found


def assert_as_alone(requests: Sequence[EngineRequest], outputs: dict[str, list[int]], alone: Any) -> None:
    assert outputs == alone
    for request in requests:
        answer = answer_of(request.sampling.reasoning, outputs[request.request_id])
        if request.sampling.grammar is not None:
            matcher = Toy().compile(request.sampling.grammar)
            assert all(matcher.advance(token) for token in answer)
        elif request.sampling.reasoning is None:
            assert outputs[request.request_id] == expected(request)
    assert any(outputs[r.request_id] != expected(r) for r in requests if r.sampling.grammar), "the grammar does nothing"


@few(5)
@pytest.mark.parametrize("plugins", sets(*FACTORS))
def test_constrained_outputs_and_those_beside_them_are_the_same_whatever_is_swapped(
    plugins: Plugins, alone: dict[str, list[int]]
) -> None:
    requests = requests_of(1, 14)
    engine = constrained_engine(*overrides(plugins), graphs=plugins[4] == "captured")
    assert_as_alone(requests, run(engine.core, requests), alone)
    assert_nothing_held(engine)
    engine.core.close()


@few(3)
@pytest.mark.parametrize("plugins", sets(FACTORS[0], ("paged", "prefix_cache"), *FACTORS[2:]))
def test_matchers_follow_requests_that_are_preempted(plugins: Plugins, alone: dict[str, list[int]]) -> None:
    requests = requests_of(1, 14)
    captured = plugins[4] == "captured"
    engine = constrained_engine(*overrides(plugins), kv_tokens=160, max_len=128, graphs=captured)
    assert_as_alone(requests, run(engine.core, requests, per_step=14), alone)
    assert_nothing_held(engine)
    engine.core.close()


@pytest.mark.parametrize("steps", ["eager", "captured"])
def test_a_matcher_that_gives_up_ends_its_own_request_with_a_reason(steps: str) -> None:
    engine = constrained_engine(*overrides(("continuous", "paged", "ngram", "true", steps)), graphs=steps == "captured")
    hard = EngineRequest("hard", (1, 2), SamplingParams(max_tokens=20, temperature=0.0, grammar=Grammar("regex", "4")))
    wrong = EngineRequest("wrong", (1, 2), SamplingParams(max_tokens=9, grammar=Grammar("regex", "not a number")))
    plain = EngineRequest("plain", (3, 4), SamplingParams(max_tokens=30, temperature=0.0))
    errors, outputs = {}, {request.request_id: list[int]() for request in (hard, wrong, plain)}
    for request in (hard, wrong, plain):
        engine.core.submit(request)
    while engine.core.has_work:
        for out in engine.core.step().outputs:
            outputs[out.request_id].extend(out.tokens)
            if out.error:
                errors[out.request_id] = out.error
    assert errors.keys() == {"hard", "wrong"}
    assert errors["hard"] == "the output cannot follow its grammar: it is too hard"
    assert errors["wrong"].startswith("the output cannot follow its grammar: ")
    assert outputs["plain"] == expected(plain) and len(outputs["hard"]) <= 6
    assert_nothing_held(engine)
    engine.core.close()


# With a real model and real grammars ----------------------------------------------------------------------------

COMMON = ("device=cpu", "threads=1", "model.max_len=1024", "exporter=[]", "scheduler.max_requests=8", "seed=3")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "minItems": 1, "maxItems": 3},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar("json_schema", json.dumps(PERSON)),
    Grammar("regex", "[0-9]{3}-[0-9]{4}"),
    Grammar("choice", '["yes", "no", "perhaps"]'),
)
TEXTS = ("What does json.dumps do?", "The unittest module provides " * 12)
SETS = {
    "no overlap": ("overlap=false",),
    "small chunks": ("scheduler=chunked_prefill", "scheduler.token_budget=24"),
    "ngram": ("drafter=ngram", "drafter.adaptive=false", "drafter.min_match=1"),
    "early_exit": ("drafter=early_exit", "drafter.adaptive=false", "drafter.layers=2"),
    "draft_model": ("drafter=draft_model", "drafter.adaptive=false"),
    "eagle3": ("drafter=eagle3", "drafter.adaptive=false", "drafter.max_width=3"),
    "eager": ("execution=eager", "drafter=eagle3", "drafter.adaptive=false"),
}
RANKS = {
    "tp=2": ("parallelism.tp=2",),
    "pp=2": ("parallelism.pp=2",),
    "tp=2 pp=2, eagle3": ("parallelism.tp=2", "parallelism.pp=2", "drafter=eagle3", "drafter.adaptive=false"),
}


def asked(llm: LLM) -> list[Completion]:
    greedy = [
        one for grammar in GRAMMARS for one in llm.generate(TEXTS, max_tokens=90, temperature=0.0, grammar=grammar)
    ]
    seeded = [
        one
        for grammar in GRAMMARS
        for one in llm.generate(TEXTS, max_tokens=90, temperature=1.0, seed=7, grammar=grammar)
    ]
    llm.core.check_idle()
    return greedy + seeded


def assert_of_grammar(found: Sequence[Completion]) -> None:
    """Those that have ended; the others were as long as they may be."""
    ended = 0
    for completion, grammar in zip(found, [grammar for grammar in GRAMMARS * 2 for _ in TEXTS], strict=True):
        if completion.finish_reason != "stop":
            continue
        ended += 1
        if grammar.kind == "json_schema":
            jsonschema.validate(json.loads(completion.text), PERSON)
        elif grammar.kind == "choice":
            assert completion.text in json.loads(grammar.text)
        else:
            assert len(completion.text) == 8
    assert ended > 8


@pytest.fixture(scope="module")
def plain() -> Iterator[list[Completion]]:
    llm = LLM("bundled", overrides=[*COMMON])
    yield asked(llm)
    llm.close()


@few(1)
@pytest.mark.parametrize("name", SETS)
def test_outputs_are_of_their_grammars_and_the_same_whoever_drafts(name: str, plain: list[Completion]) -> None:
    llm = LLM("bundled", overrides=[*COMMON, *SETS[name]])
    found = asked(llm)
    llm.close()
    assert_of_grammar(found)
    assert [one.tokens for one in found] == [one.tokens for one in plain]


@few(1)
@pytest.mark.parametrize("layout", RANKS)
def test_several_ranks_follow_grammars(layout: str) -> None:
    llm = LLM("bundled", overrides=[*COMMON, "parallelism=threads", "communicator=simulated", *RANKS[layout]])
    found = asked(llm)
    llm.close()
    assert_of_grammar(found)
