"""Conformance suite for routers: what the core relies on, whichever router is selected.

.. code-block:: python

    class TestMine(RouterConformance):
        def make(self):
            return Mine(MineConfig(), build_context())
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import msgspec

from engine.contracts.request import SamplingParams
from engine.contracts.router import (
    Answer,
    ApiRequest,
    Attempts,
    EngineView,
    ModelChoice,
    ModelChooser,
    ModelRequest,
    ModelView,
    Question,
    Reject,
    Route,
    Router,
    RouterTold,
    ToEngine,
    ToUrl,
    placing,
)
from engine.plugin_guard.calls import lacking
from engine.service.placing import choice_of_models_problem
from engine.testing.subject import Subject, Suite, filled

REQUEST = ApiRequest(
    request_id="r1",
    kind="chat",
    model="m",
    prompts=((1, 2, 3),),
    n=1,
    sampling=SamplingParams(temperature=0.0, max_tokens=4),
    cache_salt="",
    stop=(),
    stream=False,
    echo=False,
)
ANSWER = Answer(({"tokens": (7, 8), "logprobs": (), "finish_reason": "stop"},))
ALIVE = EngineView("default", "m", alive=True, running=0, waiting=0, kv_used=0.0)
LONGEST_S, CALLS = 0.1, 3
"""A call may take so long on the slowest machine: all others wait for it. The quickest of several calls counts, so that
a machine that is busy with something else fails no router."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
SEEDED = SamplingParams(temperature=0.8, max_tokens=4, seed=7)
OTHER_GREEDY = (
    {"max_tokens": 5}, {"min_tokens": 1}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.5}, {"logit_bias": {5: 1.0}}, {"stop_token_ids": (9,)}, {"ignore_eos": True},
    {"logprobs": 0}, {"logprobs": 1}, {"prompt_logprobs": 1},
)  # fmt: skip
"""Each makes another answer of a request, sampled or not."""
OTHER_SEEDED = ({"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"seed": 8}, {"seed": None})
"""Each makes another answer of a request that is sampled with a seed."""
QUESTION = "How do I return an item?"
OTHER_QUESTIONS = (
    ("Can cats eat dogs?", "Can dogs eat cats?"),
    ("How do I get from Paris to Rome?", "How do I get from Rome to Paris?"),
    ("What is the dose for 10 kg?", "What is the dose for 100 kg?"),
    ("What is the dose for 10 kg?", "What is the dose for 10 lb?"),
    ("Which foods are safe for dogs?", "Which foods are not safe for dogs?"),
    ("Can I fly with a passport?", "Can I fly without a passport?"),
    ("How do I enable the alarm?", "How do I disable the alarm?"),
    ("Can I swim before lunch?", "Can I swim after lunch?"),
    ("Which lake is the largest?", "Which lake is the smallest?"),
    ("Who wrote Hamlet?", "Who wrote Faust?"),
    ("Who wrote Hamlet?", "When was Hamlet written?"),
)
FLEET = tuple([replace(ALIVE, engine_id=name, block_size=16) for name in "abc"])
MODELS = (
    ModelView("small", alive=True, max_len=4096),
    ModelView("medium", alive=True),
    ModelView("large", alive=False),
)
NOT_OF_A_ROUTER = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
"""Beside what it keeps."""


def bytes_kept(router: object) -> int:
    """Of all that can be reached from an object, once, but for code."""
    size, seen, left = 0, set[int](), [router]
    while left:
        found = left.pop()
        if id(found) not in seen and not isinstance(found, NOT_OF_A_ROUTER):
            seen.add(id(found))
            size += sys.getsizeof(found)
            left += gc.get_referents(found)
    return size


class RouterConformance:
    """Inherit, name the class ``Test...``, and implement :meth:`make`."""

    num_requests: int = 2400
    """After so many a router keeps as much as it ever will."""
    most_leaked: int = 16
    """Bytes that it may keep of each further one."""
    most_s: float = 30.0
    """So many requests take no longer than this on the slowest machine."""

    def make(self) -> Router:
        """A fresh router."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self)")

    def router(self) -> Router:
        """A fresh router, as the core takes it."""
        made: Router = placing(self.make())
        return made

    def test_it_fulfils_the_contract(self) -> None:
        made = self.router()
        assert isinstance(made, Router), lacking(made, Router)

    def test_a_new_request_goes_to_an_engine_that_is_alive_or_to_a_url(self) -> None:
        fleet = (replace(ALIVE, engine_id="dead", alive=False), ALIVE)
        route = self.router().place(REQUEST, fleet)
        assert isinstance(route, (Attempts, ToEngine, ToUrl)), route
        self.check(route, fleet)

    def test_fleets_of_any_size_and_load_are_served(self) -> None:
        """One router sees engines come, go and die; whatever it remembers of them."""
        names = ("a", "b", "c", "d")
        engines = {name: replace(ALIVE, engine_id=name, running=i, waiting=9 - i) for i, name in enumerate(names)}
        full = replace(ALIVE, engine_id="full", running=10_000, waiting=10_000, kv_used=1.0)
        router = self.router()
        for turn, alive in enumerate(("abcd", "bcd", "d", "abc", "c", "", "ab", "a")):
            fleet = (full, *(replace(engine, alive=name in alive) for name, engine in engines.items()))
            for some in (fleet, fleet[1:], fleet[: 1 + turn % 5], fleet[::-1]):
                self.check(router.place(replace(REQUEST, request_id=f"r{turn}"), some), some)

    def test_requests_of_any_kind_are_routed(self) -> None:
        router = self.router()
        for changes in (
            {"kind": "completion"}, {"stream": True}, {"echo": True}, {"n": 4}, {"stop": ("a", "b")},
            {"prompts": ((1,), (2, 3))}, {"prompts": (tuple(range(5000)),)}, {"cache_salt": "tenant"},
            {"sampling": SEEDED}, {"fields": {"user": "u", "stop": ["a"], "logit_bias": {"5": 1.0}, "seed": None}},
        ):  # fmt: skip
            request = replace(REQUEST, **changes)
            self.check(router.place(request, (ALIVE,)), (ALIVE,))
            choices = ANSWER.choices * (len(request.prompts) * request.n)
            router.finished(request, Answer(choices))

    def check(self, route: Route, fleet: tuple[EngineView, ...]) -> None:
        """The core can take it: to an engine that is there and alive, to a URL, or a refusal with a reason."""
        assert isinstance(route, Route), f"{route!r} is no route"
        alive = {engine.engine_id for engine in fleet if engine.alive}
        if isinstance(route, ToEngine):
            assert route.engine_id in alive, f"{route} while {sorted(alive)} are alive"
        elif isinstance(route, Attempts):
            assert route.engines and set(route.engines) <= alive, f"{route} while {sorted(alive)} are alive"
            assert len(set(route.engines)) == len(route.engines), f"{route} names an engine twice"
        elif isinstance(route, ToUrl):
            assert route.base_url.startswith(("http://", "https://")), route
        elif isinstance(route, Reject):
            self.check_refusal(route)

    def check_refusal(self, route: Reject) -> None:
        assert type(route.status) is int and 400 <= route.status <= 599, route
        assert isinstance(route.message, str) and route.message, route
        assert route.retry_after_s is None or (type(route.retry_after_s) is int and route.retry_after_s > 0), route

    def test_a_request_nobody_can_take_is_refused_as_unavailable(self) -> None:
        for fleet in ((replace(ALIVE, alive=False),), ()):
            route = self.router().place(REQUEST, fleet)
            assert isinstance(route, (Reject, ToUrl)), route
            if isinstance(route, Reject):
                self.check_refusal(route)
                assert route.status == 503

    def test_it_does_not_block(self) -> None:
        """Routers live in the event loop: while one waits, no client of the server gets a token."""
        router = self.router()
        requests = [replace(REQUEST, request_id=f"r{i}", prompts=((i, 2, 3),)) for i in range(CALLS)]
        assert self.quickest([partial(router.place, r, (ALIVE,)) for r in requests]) < LONGEST_S, "place() waits"
        assert self.quickest([partial(router.finished, r, ANSWER) for r in requests]) < LONGEST_S, "finished() waits"
        assert self.quickest([partial(router.place, r, ()) for r in requests]) < LONGEST_S, (
            "place() waits for an engine"
        )
        assert self.quickest([partial(self.begin, router, r, FLEET[:1]) for r in requests]) < LONGEST_S, "begun() waits"

    @staticmethod
    def begin(router: Router, request: ApiRequest, engines: Iterable[EngineView]) -> None:
        """Tell a router that wants to know it that engines were sent a request."""
        if isinstance(router, RouterTold):
            for engine in engines:
                router.begun(request, engine.engine_id)

    def test_what_is_placed_and_does_not_begin_changes_nothing(self) -> None:
        """A decision need not come about: the request may be refused after it, or its engine may be gone."""
        rng = random.Random(0)
        begun = [self.request(rng) for _ in range(10)]
        router, other = self.router(), self.router()
        for request in begun:
            for each in (router, other):
                each.place(request, FLEET)
                self.begin(each, request, FLEET[:2])
            expected = other.place(request, FLEET)
            for _ in range(3):
                fleet = rng.choice((FLEET, FLEET[:1], FLEET[1:], (), tuple([replace(e, starts=2) for e in FLEET])))
                router.place(self.request(rng), fleet)
                router.place(request, fleet)
            asked = [router.place(request, FLEET) for _ in range(2)]
            assert asked == [expected] * 2, f"{asked} where {expected} would have been without requests in between"

    @staticmethod
    def request(rng: random.Random) -> ApiRequest:
        """One of a few beginnings, an end of its own, and maybe more of both."""
        prompts = [(rng.randrange(3),) * 64 + (rng.randrange(9),) * rng.randrange(64) for _ in range(rng.randint(1, 3))]
        return replace(REQUEST, request_id=f"r{rng.random()}", prompts=tuple(prompts), n=rng.randint(1, 2))

    def test_what_has_begun_may_be_told_of_any_engine_at_any_time(self) -> None:
        """Before anything was placed, of engines that have died or gone, again, and after the answer."""
        rng = random.Random(1)
        router = self.router()
        requests = [self.request(rng) for _ in range(20)]
        self.begin(router, requests[0], FLEET)
        for _ in range(200):
            request = rng.choice(requests)
            fleet = tuple([
                replace(engine, alive=rng.random() < 0.7, starts=rng.randint(1, 3), block_size=rng.choice((1, 16, 64)))
                for engine in rng.sample(FLEET, rng.randint(0, 3))
            ])  # fmt: skip
            match rng.randrange(3):
                case 0:
                    self.check(router.place(request, fleet), fleet)
                case 1:
                    self.begin(router, request, [rng.choice(FLEET)])
                case 2:
                    router.finished(request, Answer(ANSWER.choices * (len(request.prompts) * request.n)))

    def test_what_it_keeps_is_bounded(self) -> None:
        """A server runs for months."""
        router = self.router()
        self.serve(router, 0)
        before = bytes_kept(router)
        self.serve(router, 1)
        leaked = (bytes_kept(router) - before) / self.num_requests
        assert leaked < self.most_leaked, f"{leaked:.0f} bytes of each request are kept"

    def serve(self, router: Router, part: int) -> None:
        """So many requests; half get no answer, some are long. Beside an engine that stays others come and go, each
        with a new name."""
        started = time.perf_counter()
        for i in range(part * self.num_requests, (part + 1) * self.num_requests):
            prompt = (i, *[7] * (7 if i % 16 else 7999))
            request = replace(REQUEST, request_id=f"request-{i}", prompts=(prompt,))
            fleet = (FLEET[0], replace(FLEET[1], engine_id=f"b{i // 1200}"))
            router.place(request, fleet)
            self.begin(router, request, fleet)
            if i % 2:
                router.finished(request, ANSWER)
            assert time.perf_counter() - started < self.most_s, f"{i} requests took {self.most_s:g} s"

    @staticmethod
    def quickest(calls: list[Callable[[], object]]) -> float:
        """Seconds."""
        times = []
        for call in calls:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return min(times)

    def test_an_answer_is_never_given_to_another_request(self) -> None:
        others = (
            replace(REQUEST, prompts=((1, 2, 4),)),
            replace(REQUEST, prompts=((3, 2, 1),)),
            replace(REQUEST, prompts=((1, 2), (3,))),
            replace(REQUEST, prompts=((12, 3),)),
            replace(REQUEST, model="other"),
            replace(REQUEST, fingerprint="fp_other"),
            replace(REQUEST, cache_salt="tenant"),
            replace(REQUEST, kind="completion"),
            replace(REQUEST, n=2),
            replace(REQUEST, stop=("x",)),
            replace(REQUEST, echo=True),
            replace(REQUEST, fields={"skip_special_tokens": False}),
            replace(REQUEST, fields={"include_stop_str_in_output": True}),
            replace(REQUEST, sampling=SamplingParams(temperature=1.0, max_tokens=4)),
        )
        self.check_others(REQUEST, others)

    def test_a_question_is_never_answered_as_one_that_asks_something_else(self) -> None:
        """However similar it is: numbers, negations, the order of words, names, opposites."""
        for texts in OTHER_QUESTIONS:
            one, two = (self.asking(text) for text in texts)
            self.check_others(one, [two])

    def test_a_question_is_never_answered_as_one_of_another_tenant_plan_or_conversation(self) -> None:
        """In the same words or in others: what a model read before it shapes its answer."""
        request = self.asking(QUESTION)
        others = [
            self.asking(text, **changes)
            for text in (QUESTION, "please, how to return items")
            for changes in (
                {"rest": "Be rude."}, {"cache_salt": "tenant"}, {"model": "other"}, {"fingerprint": "fp_other"},
                {"kind": "messages"}, {"n": 2}, {"stop": ("x",)}, {"fields": {"response_format": {"type": "x"}}},
            )
        ]  # fmt: skip
        self.check_others(request, others)

    @staticmethod
    def asking(text: str, rest: str = "Be kind.", **changes: Any) -> ApiRequest:
        """A conversation whose prompt is its texts."""
        prompt = tuple(f"{rest} {text}".encode())
        return replace(REQUEST, prompts=(prompt,), question=Question(text, rest), **changes)

    def test_an_answer_is_never_given_to_a_request_with_other_sampling(self) -> None:
        for sampling, changes in ((GREEDY, OTHER_GREEDY), (SEEDED, (*OTHER_GREEDY, *OTHER_SEEDED))):
            request = replace(REQUEST, sampling=sampling)
            others = [msgspec.structs.replace(sampling, **other) for other in changes]
            self.check_others(request, [replace(request, sampling=other) for other in others])

    def check_others(self, request: ApiRequest, others: Sequence[ApiRequest]) -> None:
        for asked, answered in [(other, request) for other in others] + [(request, other) for other in others]:
            router = self.router()
            router.place(answered, (ALIVE,))
            router.finished(answered, ANSWER)
            assert not isinstance(router.place(asked, (ALIVE,)), Answer), f"{asked} is answered as {answered}"

    def test_an_answer_given_twice_is_the_answer_that_was_stored(self) -> None:
        router = self.router()
        router.finished(REQUEST, ANSWER)
        for request_id, stream in (("r2", False), ("r3", True)):
            route = router.place(replace(REQUEST, request_id=request_id, stream=stream), (ALIVE,))
            assert isinstance(route, (Attempts, ToEngine, ToUrl)) or route == ANSWER

    def test_samples_without_a_seed_are_drawn_anew(self) -> None:
        router = self.router()
        free = replace(REQUEST, sampling=SamplingParams(temperature=0.8))
        router.finished(free, ANSWER)
        assert not isinstance(router.place(free, (ALIVE,)), Answer)

    def test_requests_whose_answers_come_in_another_order_get_their_own(self) -> None:
        router = self.router()
        requests = [replace(REQUEST, request_id=f"r{i}", prompts=((i, 2, 3),)) for i in range(3)]
        answers = [Answer(({**ANSWER.choices[0], "tokens": (i,)},)) for i in range(3)]
        for request in requests:
            router.place(request, (ALIVE,))
        for i in (2, 0, 1):
            router.finished(requests[i], answers[i])
        for request, answer in zip(requests, answers, strict=True):
            route = router.place(replace(request, request_id="again"), (ALIVE,))
            assert not isinstance(route, Answer) or route == answer, request

    def test_models_are_ordered_whatever_is_asked(self) -> None:
        """Only some of those that there are, each once; the same for the same request; at once."""
        router = self.router()
        if not isinstance(router, ModelChooser):
            return
        prompts: tuple[dict[str, bytes], ...] = (
            {}, {"messages": b"[]"}, {"messages": b'[{"role":"user","content":"hi"}]'}, {"messages": b"null"},
            {"prompt": b'"hi"'}, {"input": b"7"}, {"tools": b"[{}]", "messages": b'["hi"]'},
            {"messages": b'[{"role":"user","content":"' + b"a" * 100_000 + b'"}]'}, {"messages": b"\xff"},
        )  # fmt: skip
        for views in (MODELS, MODELS[:1], MODELS[::-1], tuple([replace(view, alive=False) for view in MODELS])):
            for prompt in prompts:
                request = ModelRequest("r1", "chat", "auto", prompt, {"max_tokens": 4})
                choice: object = router.choose(request, views)
                chosen = choice if isinstance(choice, ModelChoice) else ModelChoice(choice)  # type: ignore[arg-type]
                wrong = choice_of_models_problem(chosen, [view.name for view in views])
                assert not wrong, f"choose() {wrong}"
                assert router.choose(request, views) == choice, "the same request goes elsewhere"
                assert self.quickest([partial(router.choose, request, views)] * CALLS) < LONGEST_S, "choose() waits"


def suite_for(subject: Subject) -> Suite:
    """For ``engine plugins check``."""
    return filled(subject, [RouterConformance], make=lambda self: subject.build())
