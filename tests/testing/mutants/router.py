"""Routers with a bug each."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec

from engine.contracts.config import SlotConfig
from engine.contracts.router import Answer, ApiRequest, Attempts, EngineView, Reject, Route, ToEngine, ToUrl
from engine.testing.context import build_context
from engine.testing.router import RouterConformance
from engine_plugins.embedder.ngrams import NgramsConfig, NgramsEmbedder
from engine_plugins.router.direct import DirectRouter
from engine_plugins.router.least_load import LeastLoadRouter
from engine_plugins.router.prefix import Index, PrefixConfig, PrefixRouter
from engine_plugins.router.response_cache import ResponseCacheConfig, ResponseCacheRouter
from engine_plugins.router.semantic_cache import SemanticCacheConfig, SemanticCacheRouter
from tests.testing.mutants.mutant import OnPlugin, mutant

Fleet = tuple[EngineView, ...]
BLOCKS = "test_it_does_not_block"
FLEETS = "test_fleets_of_any_size_and_load_are_served"
KINDS = "test_requests_of_any_kind_are_routed"
OTHERS = "test_an_answer_is_never_given_to_another_request"
SAMPLING = "test_an_answer_is_never_given_to_a_request_with_other_sampling"
PURE = "test_what_is_placed_and_does_not_begin_changes_nothing"
BEGUN = "test_what_has_begun_may_be_told_of_any_engine_at_any_time"
BOUNDED = "test_what_it_keeps_is_bounded"
REFUSED = "test_a_request_nobody_can_take_is_refused_as_unavailable"


class Suite(OnPlugin, RouterConformance):
    def make(self) -> Any:
        return self.plugin(SlotConfig(), build_context())


class CacheSuite(OnPlugin, RouterConformance):
    def make(self) -> Any:
        return self.plugin(ResponseCacheConfig(), build_context())


class SemanticSuite(OnPlugin, RouterConformance):
    def make(self) -> Any:
        context = build_context()
        asking = replace(context, embedder=lambda: NgramsEmbedder(NgramsConfig(), context))
        return self.plugin(SemanticCacheConfig(audit=0.0, max_entries=100), asking)


class PrefixSuite(OnPlugin, RouterConformance):
    def make(self) -> Any:
        return self.plugin(PrefixConfig(), build_context())


class SemanticCache(SemanticCacheRouter):
    """Compares what :meth:`seen` leaves of a question. An equal request is answered as it is."""

    def seen(self, request: ApiRequest) -> ApiRequest:
        return request

    def _key(self, request: ApiRequest) -> bytes | None:
        return None if request.question is None else super()._key(self.seen(request))


class Cache(ResponseCacheRouter):
    """Keys answers by what :meth:`seen` leaves of a request."""

    def seen(self, request: ApiRequest) -> ApiRequest:
        return request

    def place(self, request: ApiRequest, fleet: Fleet) -> Route:
        return super().place(self.seen(request), fleet)

    def finished(self, request: ApiRequest, answer: Answer) -> None:
        super().finished(self.seen(request), answer)


@mutant(Suite, BLOCKS)
class AsksAServer(DirectRouter):
    """Waits 0.3 s for another server before it decides."""

    def place(self, request: ApiRequest, fleet: Fleet) -> Route:
        time.sleep(0.3)
        return super().place(request, fleet)


@mutant(Suite, BLOCKS)
class WritesADatabase(DirectRouter):
    """Waits 0.3 s for a disk once an answer is there."""

    def finished(self, request: ApiRequest, answer: Answer) -> None:
        time.sleep(0.3)


@mutant(Suite, BLOCKS)
class WaitsForAnEngine(DirectRouter):
    """Sleeps until an engine may be there again."""

    def place(self, request: ApiRequest, fleet: Fleet) -> Route:
        if not fleet:
            time.sleep(0.3)
        return super().place(request, fleet)


@mutant(Suite, "test_a_new_request_goes_to_an_engine_that_is_alive_or_to_a_url", FLEETS)
class NamesTheEngine(DirectRouter):
    """Returns the engine's name instead of a route."""

    def place(self, request: ApiRequest, fleet: Fleet) -> Any:
        route = super().place(request, fleet)
        return route.engines[0] if isinstance(route, Attempts) else route


@mutant(Suite, FLEETS, REFUSED)
class FirstOfAll(DirectRouter):
    """Takes the first engine, dead or alive."""

    def place(self, request: ApiRequest, fleet: Fleet) -> Route:
        return ToEngine(fleet[0].engine_id) if fleet else super().place(request, fleet)


@mutant(Suite, REFUSED)
class NothingForNobody(DirectRouter):
    """Returns None where no engine is alive."""

    def place(self, request: ApiRequest, fleet: Fleet) -> Any:
        route = super().place(request, fleet)
        return None if isinstance(route, Reject) else route


@mutant(Suite, REFUSED, raises=ValueError)
class EmptyFleet(DirectRouter):
    """Takes the least loaded engine of a fleet that may have none."""

    def place(self, request: ApiRequest, fleet: Fleet) -> Route:
        least = min(fleet, key=lambda engine: engine.waiting)
        return ToEngine(least.engine_id) if least.alive else super().place(request, fleet)


@mutant(Suite, FLEETS, PURE)
class RoundRobin(DirectRouter):
    """Goes round the engines that it saw first, whichever are left."""

    def __init__(self, config: SlotConfig, context: Any) -> None:
        super().__init__(config, context)
        self._known: list[str] = []
        self._turn = 0

    def place(self, request: ApiRequest, fleet: Fleet) -> Route:
        alive = [engine.engine_id for engine in fleet if engine.alive]
        if not alive:
            return super().place(request, fleet)
        self._known = self._known or alive
        self._turn += 1
        return ToEngine(self._known[self._turn % len(self._known)])


@mutant(Suite, FLEETS, raises=ZeroDivisionError)
class SharesOfLoad(DirectRouter):
    """Divides by the load of engines that have none."""

    def place(self, request: ApiRequest, fleet: Fleet) -> Route:
        alive = [engine for engine in fleet if engine.alive]
        weights = {engine.engine_id: 1 / (engine.running + engine.waiting - 9) for engine in alive}
        return ToEngine(max(weights, key=weights.__getitem__)) if weights else super().place(request, fleet)


@mutant(Suite, REFUSED)
class RefusedAsFine(DirectRouter):
    """Refuses with status 200."""

    def place(self, request: ApiRequest, fleet: Fleet) -> Route:
        route = super().place(request, fleet)
        return replace(route, status=200) if isinstance(route, Reject) else route


@mutant(Suite, REFUSED)
class RetryInAFraction(DirectRouter):
    """Asks clients to come back in half a second, where whole seconds are meant."""

    def place(self, request: ApiRequest, fleet: Fleet) -> Route:
        route = super().place(request, fleet)
        return replace(route, retry_after_s=0.5) if isinstance(route, Reject) else route  # type: ignore[arg-type]


@mutant(Suite, FLEETS)
class HostWithoutScheme(DirectRouter):
    """Sends requests to a host without saying how."""

    def place(self, request: ApiRequest, fleet: Fleet) -> Route:
        return ToUrl("10.0.0.2:8000/v1")


@mutant(Suite, KINDS, raises=ValueError)
class OnePromptOnly(DirectRouter):
    """Expects one prompt in a request."""

    def place(self, request: ApiRequest, fleet: Fleet) -> Route:
        (prompt,) = request.prompts
        assert prompt
        return super().place(request, fleet)


@mutant(Suite, KINDS, raises=ValueError)
class OneChoiceOnly(DirectRouter):
    """Expects one choice in an answer."""

    def finished(self, request: ApiRequest, answer: Answer) -> None:
        (choice,) = answer.choices
        assert choice


@mutant(CacheSuite, "test_samples_without_a_seed_are_drawn_anew")
class CachesSamples(Cache):
    """Keeps answers of requests that want a new sample each time."""

    def seen(self, request: ApiRequest) -> ApiRequest:
        seed = request.sampling.seed or 0
        return replace(request, sampling=msgspec.structs.replace(request.sampling, seed=seed))


@mutant(CacheSuite, OTHERS)
class ForgetsTheSalt(Cache):
    """Answers one tenant with what another was answered."""

    def seen(self, request: ApiRequest) -> ApiRequest:
        return replace(request, cache_salt="")


QUESTIONS = "test_a_question_is_never_answered_as_one_that_asks_something_else"
CONVERSATIONS = "test_a_question_is_never_answered_as_one_of_another_tenant_plan_or_conversation"


@mutant(SemanticSuite, QUESTIONS)
class ComparesSimilarity(SemanticCache):
    """Answers whatever is similar enough, as most semantic caches do."""

    def seen(self, request: ApiRequest) -> ApiRequest:
        return replace(request, question=replace(request.question, text="What is asked?"))  # type: ignore[type-var]


@mutant(SemanticSuite, QUESTIONS)
class SortsWords(SemanticCache):
    """Compares words whatever their order is."""

    def seen(self, request: ApiRequest) -> ApiRequest:
        assert request.question is not None
        words = " ".join(sorted(request.question.text.lower().rstrip("?").split()))
        return replace(request, question=replace(request.question, text=f"which {words}?"))


@mutant(SemanticSuite, CONVERSATIONS)
class ForgetsTheSystemPrompt(SemanticCache):
    """Compares the last turn alone."""

    def seen(self, request: ApiRequest) -> ApiRequest:
        return replace(request, question=replace(request.question, rest=None))  # type: ignore[type-var]


@mutant(SemanticSuite, CONVERSATIONS)
class SharesAmongTenants(SemanticCache):
    """Forgets the salt of the tenant where words differ."""

    def seen(self, request: ApiRequest) -> ApiRequest:
        return replace(request, cache_salt="")


@mutant(SemanticSuite, CONVERSATIONS)
class ForgetsThePlan(SemanticCache):
    """Gives what one quantizer made to requests for another."""

    def seen(self, request: ApiRequest) -> ApiRequest:
        return replace(request, fingerprint="")


@mutant(CacheSuite, OTHERS)
class ForgetsTheModel(Cache):
    """Answers for one model with what another said."""

    def seen(self, request: ApiRequest) -> ApiRequest:
        return replace(request, model="")


@mutant(CacheSuite, OTHERS)
class JoinsPrompts(Cache):
    """Takes two prompts for one long one."""

    def seen(self, request: ApiRequest) -> ApiRequest:
        joined = tuple(token for prompt in request.prompts for token in prompt)
        return replace(request, prompts=(joined,) * len(request.prompts[:1]))


@mutant(CacheSuite, OTHERS)
class HashesDigits(Cache):
    """Keys prompts by the digits of their tokens, which 1, 2 and 12 share."""

    def seen(self, request: ApiRequest) -> ApiRequest:
        digits = "".join(str(token) for prompt in request.prompts for token in prompt)
        return replace(request, prompts=((int(digits or 0),),))


@mutant(CacheSuite, OTHERS)
class ForgetsFields(Cache):
    """Forgets fields that shape the text of an answer and none of its tokens."""

    def seen(self, request: ApiRequest) -> ApiRequest:
        return replace(request, fields={})


@mutant(CacheSuite, SAMPLING)
class ForgetsTheBias(Cache):
    """Gives the answer of a request without ``logit_bias`` to one with it."""

    def seen(self, request: ApiRequest) -> ApiRequest:
        return replace(request, sampling=msgspec.structs.replace(request.sampling, logit_bias={}))


@mutant(CacheSuite, SAMPLING)
class ForgetsLogprobs(Cache):
    """Gives an answer without logprobs to a request that asks for them."""

    def seen(self, request: ApiRequest) -> ApiRequest:
        return replace(request, sampling=msgspec.structs.replace(request.sampling, logprobs=None))


@mutant(CacheSuite, SAMPLING)
class ForgetsFilters(Cache):
    """Gives a sample to requests with the same seed and other filters."""

    def seen(self, request: ApiRequest) -> ApiRequest:
        return replace(request, sampling=msgspec.structs.replace(request.sampling, top_p=1.0, top_k=0, min_p=0.0))


@mutant(CacheSuite, "test_requests_whose_answers_come_in_another_order_get_their_own")
class AnswersTheLast(Cache):
    """Stores an answer under the request that was routed last."""

    _last: ApiRequest | None = None

    def place(self, request: ApiRequest, fleet: Fleet) -> Route:
        self._last = request
        return super().place(request, fleet)

    def finished(self, request: ApiRequest, answer: Answer) -> None:
        super().finished(self._last or request, answer)


@mutant(CacheSuite, "test_an_answer_given_twice_is_the_answer_that_was_stored")
class DropsLogprobs(Cache):
    """Gives stored tokens back without their logprobs."""

    def place(self, request: ApiRequest, fleet: Fleet) -> Route:
        route = super().place(request, fleet)
        if not isinstance(route, Answer):
            return route
        return Answer(tuple({"tokens": choice["tokens"]} for choice in route.choices))


@mutant(Suite, missed="the quickest of several calls counts, or a busy machine would fail routers that are right")
class BlocksNowAndThen(DirectRouter):
    """Waits 0.3 s at every third request."""

    _calls = 0

    def place(self, request: ApiRequest, fleet: Fleet) -> Route:
        self._calls += 1
        if self._calls % 3 == 0:
            time.sleep(0.3)
        return super().place(request, fleet)


@mutant(Suite, FLEETS, BEGUN)
class DeadOnesLast(LeastLoadRouter):
    """Has engines that are dead take over from those that are alive."""

    def place(self, request: ApiRequest, fleet: Fleet) -> Route:
        route = super().place(request, fleet)
        dead = [engine.engine_id for engine in fleet if not engine.alive]
        return replace(route, engines=(*route.engines, *dead)) if isinstance(route, Attempts) else route


@mutant(Suite, PURE)
class TakesTurnsWhenAsked(LeastLoadRouter):
    """Goes on to the next engine when it is asked, whether or not anything is sent there."""

    def place(self, request: ApiRequest, fleet: Fleet) -> Route:
        self._turn += 1
        return super().place(request, fleet)


@mutant(PrefixSuite, PURE)
class RemembersWhatItPlaced(PrefixRouter):
    """Takes a prompt for cached where it would have been sent."""

    def place(self, request: ApiRequest, fleet: Fleet) -> Route:
        route = super().place(request, fleet)
        if isinstance(route, Attempts) and len(fleet) > 1:
            self.begun(request, route.engines[0])
        return route


@mutant(PrefixSuite, PURE)
class ForgetsWhenAsked(PrefixRouter):
    """Forgets what an engine has cached when it is asked about a fleet without it."""

    def place(self, request: ApiRequest, fleet: Fleet) -> Route:
        names = {engine.engine_id for engine in fleet}
        self._indexes = {name: index for name, index in self._indexes.items() if name in names}
        return super().place(request, fleet)


@mutant(Suite, BEGUN, raises=KeyError)
class BegunOnce(DirectRouter):
    """Expects a request to begin once, where it was placed."""

    def __init__(self, config: SlotConfig, context: Any) -> None:
        super().__init__(config, context)
        self._placed: dict[str, Route] = {}

    def place(self, request: ApiRequest, fleet: Fleet) -> Route:
        self._placed = {request.request_id: super().place(request, fleet)}
        return self._placed[request.request_id]

    def begun(self, request: ApiRequest, engine_id: str) -> None:
        self._placed.pop(request.request_id)


@mutant(PrefixSuite, BEGUN, raises=AttributeError)
class BegunAfterPlaced(PrefixRouter):
    """Expects that something was placed among several engines before a request begins."""

    def begun(self, request: ApiRequest, engine_id: str) -> None:
        assert self._placed.request is not request or self._placed.fleet  # type: ignore[union-attr]
        super().begun(request, engine_id)


@mutant(Suite, BOUNDED)
class CountsRequests(DirectRouter):
    """Keeps what has begun until it is answered, which what fails never is."""

    def __init__(self, config: SlotConfig, context: Any) -> None:
        super().__init__(config, context)
        self._open: dict[str, str] = {}

    def begun(self, request: ApiRequest, engine_id: str) -> None:
        self._open[request.request_id] = engine_id

    def finished(self, request: ApiRequest, answer: Answer) -> None:
        self._open.pop(request.request_id, None)


@mutant(PrefixSuite, BOUNDED)
class NeverForgets(PrefixRouter):
    """Keeps every block of every prompt."""

    def __init__(self, config: PrefixConfig, context: Any) -> None:
        super().__init__(config, context)
        self._max_blocks = 1 << 60


@mutant(PrefixSuite, BOUNDED)
class KeepsEnginesThatAreGone(PrefixRouter):
    """Keeps what engines have cached that are no longer there."""

    def __init__(self, config: PrefixConfig, context: Any) -> None:
        super().__init__(config, context)
        self._all: dict[str, Index] = {}

    def begun(self, request: ApiRequest, engine_id: str) -> None:
        super().begun(request, engine_id)
        self._all |= self._indexes


@mutant(Suite, BLOCKS)
class WritesADatabaseFirst(DirectRouter):
    """Waits 0.3 s for a disk once a request was sent."""

    def begun(self, request: ApiRequest, engine_id: str) -> None:
        time.sleep(0.3)
