from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from engine.contracts.provider import BuildContext
from engine.contracts.request import SamplingParams
from engine.contracts.router import Answer, ApiRequest, Attempts, Question
from engine.contracts.shares import share_interval
from engine.service.turns import Conversation, Turn
from engine.testing.context import build_context
from engine.testing.router import ALIVE, ANSWER, OTHER_GREEDY, REQUEST, RouterConformance
from engine_plugins.embedder.ngrams import NgramsConfig, NgramsEmbedder
from engine_plugins.router.semantic_cache import SemanticCacheConfig, SemanticCacheRouter, overlap

PLAIN = build_context()
CONTEXT = replace(PLAIN, embedder=lambda: NgramsEmbedder(NgramsConfig(), PLAIN))
FLEET = (ALIVE,)
ONE, OTHER = "How do I return an item?", "please, how to return items"
GREEDY = SamplingParams(temperature=0.0, max_tokens=100)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make(context: BuildContext = CONTEXT, clock: Clock | None = None, **config: Any) -> SemanticCacheRouter:
    config = {"audit": 0.0, "max_entries": 100, **config}
    return SemanticCacheRouter(SemanticCacheConfig(**config), context, clock or Clock())


def ask(text: str, system: str = "You are helpful.", **changes: Any) -> ApiRequest:
    turns = (Turn("system", system), Turn("user", ""))
    given = {"question": Question(text, Conversation(turns)), "prompts": (tuple((system + text).encode()),)}
    return replace(REQUEST, **{"sampling": GREEDY, "request_id": text, **given, **changes})


def answered(*tokens: int, reason: str = "stop", n: int = 1) -> Answer:
    return Answer(({"tokens": tokens, "logprobs": (), "finish_reason": reason},) * n)


def is_given(router: SemanticCacheRouter, request: ApiRequest) -> bool:
    return isinstance(router.place(request, FLEET), Answer)


class TestConformance(RouterConformance):
    def make(self) -> SemanticCacheRouter:
        return make()


class TestConformanceOfQuestions(RouterConformance):
    """The same, of requests that could be answered as similar ones."""

    most_leaked = 64

    def make(self) -> SemanticCacheRouter:
        made = make(audit=0.1)
        place, finished = made.place, made.finished
        made.place = lambda request, fleet: place(asked(request), fleet)  # type: ignore[method-assign]
        made.finished = lambda request, answer: finished(asked(request), answer)  # type: ignore[method-assign]
        return made


def asked(request: ApiRequest) -> ApiRequest:
    said = " ".join(str(token) for prompt in request.prompts for token in prompt[:3])
    return replace(request, question=Question(f"What are {said}?", len(request.prompts)))


def test_a_question_in_another_form_is_answered_from_memory_and_says_so():
    router = make()
    assert router.place(ask(ONE), FLEET) == Attempts(("default",), "the first")
    router.finished(ask(ONE), ANSWER)
    route = router.place(ask(OTHER), FLEET)
    assert route == ANSWER and isinstance(route, Answer)
    assert route.reason.startswith("stored answer to a similar question, cosine 0.")
    equal = router.place(ask(ONE), FLEET)
    assert isinstance(equal, Answer) and equal.reason == "stored answer to an equal request"


def test_a_question_that_says_something_else_goes_to_an_engine():
    router = make(min_similarity=-1.0)
    router.finished(ask(ONE), ANSWER)
    for other in ("How do I not return an item?", "How do I return 2 items?", "How do I item a return?", "Return!"):
        assert not is_given(router, ask(other)), other


def test_words_alone_do_not_do():
    router = make(min_similarity=0.99)
    router.finished(ask(ONE), ANSWER)
    assert not is_given(router, ask(OTHER)) and is_given(router, ask(ONE))


def test_an_answer_that_was_given_to_a_similar_question_is_not_stored_for_it():
    """Or one false hit would make others: the answer to a question is that of an engine."""
    router = make(min_similarity=-1.0)
    router.finished(ask(ONE), ANSWER)
    router.finished(ask(OTHER), ANSWER)
    tally = router.tally()
    assert (tally.entries, tally.hits, tally.similar_hits, tally.misses) == (1, 0, 1, 1)


OTHER_FIELDS: dict[str, Any] = {
    "kind": "messages", "model": "o", "cache_salt": "t", "stop": ("x",), "n": 2, "fields": {"response_format": {}},
    "fingerprint": "fp_other", "echo": True,
}  # fmt: skip


@pytest.mark.parametrize("field", [f.name for f in fields(REQUEST)])
def test_every_field_of_a_request_must_be_equal(field: str):
    if field in ("request_id", "stream", "prompts", "question", "sampling"):
        return
    router = make()
    router.finished(ask(ONE), ANSWER)
    assert is_given(router, ask(OTHER))
    assert not is_given(router, ask(OTHER, **{field: OTHER_FIELDS[field]}))


def test_how_an_answer_is_sent_does_not_matter():
    router = make()
    router.finished(ask(ONE), ANSWER)
    assert is_given(router, ask(OTHER, stream=True, request_id="x", fields={"stream": True, "user": "u"}))


@pytest.mark.parametrize("changes", [c for c in OTHER_GREEDY if "max_tokens" not in c])
def test_sampling_must_be_equal(changes: dict[str, Any]):
    other = msgspec.structs.replace(GREEDY, **changes)
    for first, second in ((GREEDY, other), (other, GREEDY)):
        router = make()
        router.finished(ask(ONE, sampling=first), ANSWER)
        assert not is_given(router, ask(OTHER, sampling=second))


def test_the_room_that_a_prompt_leaves_need_not_be_equal_but_enough():
    router = make()
    router.finished(ask(ONE, sampling=msgspec.structs.replace(GREEDY, max_tokens=90)), answered(*range(50)))
    for room, fits in ((91, True), (50, True), (49, False)):
        assert is_given(router, ask(OTHER, sampling=msgspec.structs.replace(GREEDY, max_tokens=room))) == fits
    assert not is_given(router, ask(OTHER, fields={"max_tokens": 60}))


salts = st.text(max_size=8)
texts = st.text(max_size=30)
samplings = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    max_tokens=st.just(100),
    top_k=st.integers(0, 3),
    top_p=st.sampled_from((1.0, 0.5)),
    min_tokens=st.integers(0, 2),
    presence_penalty=st.sampled_from((0.0, 0.5)),
    stop_token_ids=st.sampled_from(((), (5,), (5, 6))),
    logit_bias=st.dictionaries(st.integers(0, 3), st.sampled_from((1.0, 2.0)), max_size=2),
)
requests = st.builds(
    lambda text, salt, system, sampling: ask(text, system, cache_salt=salt, sampling=sampling),
    st.sampled_from((ONE, OTHER, "how can I return the items?")),
    salts,
    texts,
    samplings,
)


@given(st.lists(requests, min_size=2, max_size=6), requests)
def test_tenants_system_prompts_and_sampling_never_share(stored: list[ApiRequest], request: ApiRequest):
    router = make()
    for number, each in enumerate(stored):
        if not is_given(router, each):
            router.finished(each, answered(number))

    def scope(one: ApiRequest) -> Any:
        assert one.question is not None
        return one.cache_salt, one.question.rest, one.sampling

    for asked_for in (*stored, request):
        route = router.place(asked_for, FLEET)
        if isinstance(route, Answer):
            assert scope(stored[route.choices[0]["tokens"][0]]) == scope(asked_for)
        else:
            assert scope(asked_for) not in [scope(one) for one in stored]


def test_what_was_said_before_must_be_equal():
    router = make()
    turns = (Turn("user", "Hi"), Turn("assistant", "Hello"), Turn("user", ""))
    router.finished(ask(ONE, question=Question(ONE, Conversation(turns))), ANSWER)
    assert is_given(router, ask(OTHER, question=Question(OTHER, Conversation(turns))))
    for other in (turns[1:], (Turn("user", "Hey"), *turns[1:]), (*turns[:2], Turn("user", "", name="eve"))):
        assert not is_given(router, ask(OTHER, question=Question(OTHER, Conversation(other))))
    variables = Conversation(turns, variables={"documents": ["x"]})
    assert not is_given(router, ask(OTHER, question=Question(OTHER, variables)))


@pytest.mark.parametrize(
    "changes",
    [
        {"question": None},
        {"sampling": SamplingParams(temperature=0.7, seed=1, max_tokens=100)},
        {"sampling": SamplingParams(temperature=0.0, logprobs=1, max_tokens=100)},
        {"sampling": SamplingParams(temperature=0.0, prompt_logprobs=1, max_tokens=100)},
        {"echo": True},
    ],
)
def test_what_is_no_plain_greedy_question_needs_an_equal_one(changes: dict[str, Any]):
    router = make()
    router.finished(ask(ONE, **changes), ANSWER)
    assert is_given(router, ask(ONE, **changes)) and not is_given(router, ask(OTHER, **changes))


def test_samples_with_a_seed_are_shared_where_that_is_asked_for_and_without_one_never():
    seeded, free = SamplingParams(temperature=0.7, seed=1), SamplingParams(temperature=0.7)
    router = make(sampled=True)
    for sampling in (seeded, free):
        router.finished(ask(ONE, sampling=sampling), ANSWER)
    assert is_given(router, ask(OTHER, sampling=seeded)) and not is_given(router, ask(OTHER, sampling=free))


def test_an_answer_that_was_cut_off_is_for_equal_requests():
    router = make()
    router.finished(ask(ONE), answered(1, 2, reason="length"))
    assert is_given(router, ask(ONE)) and not is_given(router, ask(OTHER))


def test_answers_grow_old():
    clock = Clock()
    router = make(clock=clock, ttl_s=10.0)
    router.finished(ask(ONE), ANSWER)
    clock.now_s = 9.0
    assert is_given(router, ask(OTHER))
    router.finished(ask(OTHER), ANSWER)
    router.finished(ask(ONE), ANSWER)
    clock.now_s = 10.5
    assert not is_given(router, ask(OTHER)) and not is_given(router, ask(ONE)), "given again is not new"
    router.finished(ask(OTHER), answered(9))
    assert router.place(ask(ONE), FLEET) == answered(9)


def test_entries_and_bytes_are_bounded_and_the_least_recently_used_goes_first():
    router = make(max_entries=2)
    for text in ("What is a cat?", "What is a dog?"):
        router.finished(ask(text), ANSWER)
    router.finished(ask("what's a cat?"), ANSWER)
    router.finished(ask("What is an owl?"), ANSWER)
    asked_again = ("what's the cat?", "what's the dog?", "what's the owl?")
    assert [is_given(router, ask(text)) for text in asked_again] == [True, False, True]
    small = make(max_entries=1000, max_bytes=20_000)
    for number in range(200):
        small.finished(ask(f"What is part {number}?"), ANSWER)
    assert small.tally().bytes <= 2 * 20_000 and 0 < small.tally().entries < 200


def test_a_share_of_hits_is_answered_by_an_engine_and_compared():
    router = make(audit=1.0, agreement=0.5, max_false=0.5)
    router.finished(ask(ONE), answered(1, 2, 3, 4))
    assert not is_given(router, ask(OTHER)) and is_given(router, ask(ONE))
    router.finished(ask(OTHER), answered(1, 2, 3, 9))
    router.finished(ask("how to return an item"), answered(7, 8, 9))
    tally = router.tally()
    assert (tally.audits, tally.false_hits, tally.similar_hits, tally.suspended) == (2, 1, 0, False)
    assert tally.false_rate == share_interval(1, 2)
    assert router.place(ask(OTHER), FLEET) == answered(1, 2, 3, 9), "an engine answered that, so it is stored"


def test_an_audit_is_of_so_many_requests_and_always_of_the_same():
    router = make(audit=0.2)
    ids = [f"chatcmpl-{number}" for number in range(2000)]
    audited = [router.is_audited(ask(ONE, request_id=name)) for name in ids]
    assert 0.15 < sum(audited) / len(ids) < 0.25
    assert audited == [router.is_audited(ask(ONE, request_id=name)) for name in ids]
    assert not any(make(audit=0.0).is_audited(ask(ONE, request_id=name)) for name in ids)


def test_it_stops_itself_once_too_many_audits_fail_with_confidence():
    router = make(audit=0.5, max_false=0.3, min_similarity=-1.0)
    router.finished(ask(ONE), answered(1, 2))
    names = [f"r{number}" for number in range(200)]
    served, audited = (
        [name for name in names if router.is_audited(ask(OTHER, request_id=name)) == wanted] for wanted in (False, True)
    )
    texts = [f"{'please, ' * number}how to return items" for number in range(2, 20)]
    assert is_given(router, ask(OTHER, request_id=served[0]))
    for number, text in enumerate(texts):
        with capture_logs() as logs:
            router.finished(ask(text, request_id=audited[number]), answered(7, 8))
        tally = router.tally()
        assert tally.audits == tally.false_hits == number + 1
        assert tally.suspended == (share_interval(number + 1, number + 1)[0] > 0.3)
        assert bool(logs) == tally.suspended, "it is said once"
        if tally.suspended:
            break
    assert router.tally().suspended
    assert not is_given(router, ask(OTHER, request_id=served[0])) and is_given(router, ask(ONE, request_id="x"))


def test_synonyms_and_ignored_words_are_those_of_the_configuration():
    router = make(synonyms={"refund": ["money back"]}, ignored_words=["your"], min_similarity=0.0)
    router.finished(ask("What is your refund policy?"), ANSWER)
    assert is_given(router, ask("money back policy?"))
    other = make(min_similarity=0.0)
    other.finished(ask("What is your refund policy?"), ANSWER)
    assert not is_given(other, ask("refund policy?"))


@pytest.mark.parametrize(
    "key, value",
    [
        ("min_similarity", 1.5),
        ("audit", -0.1),
        ("max_false", 2.0),
        ("agreement", 7.0),
        ("max_chars", 0),
        ("max_chars", 10_001),
    ],
)
def test_values_that_mean_nothing_are_refused(key: str, value: float):
    with pytest.raises(ValueError, match=rf"router\.{key}={value}: expected"):
        SemanticCacheConfig(**{key: value})


def test_overlap_is_of_all_tokens():
    assert overlap((1, 2, 3), (1, 2, 3)) == 1.0 and overlap((1, 2), (3,)) == 0.0 and overlap((), ()) == 0.0
    assert overlap((1, 1, 2, 3), (1, 2, 2, 4)) == pytest.approx(0.5)
