"""Conformance suite for routers: what the core relies on, whichever router is selected.

.. code-block:: python

    class TestMine(RouterConformance):
        def make(self):
            return Mine(MineConfig(), build_context())
"""

from __future__ import annotations

from dataclasses import replace

from engine.contracts.request import SamplingParams
from engine.contracts.router import Answer, ApiRequest, EngineView, Reject, Router, ToEngine, ToUrl

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


class RouterConformance:
    """Inherit, name the class ``Test...``, and implement :meth:`make`."""

    def make(self) -> Router:
        """A fresh router."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self)")

    def test_it_fulfils_the_contract(self) -> None:
        assert isinstance(self.make(), Router)

    def test_a_new_request_goes_to_an_engine_that_is_alive_or_to_a_url(self) -> None:
        fleet = (replace(ALIVE, engine_id="dead", alive=False), ALIVE)
        route = self.make().route(REQUEST, fleet)
        assert isinstance(route, (ToEngine, ToUrl)), route
        if isinstance(route, ToEngine):
            assert route.engine_id == "default"

    def test_a_request_nobody_can_take_is_refused_as_unavailable(self) -> None:
        route = self.make().route(REQUEST, (replace(ALIVE, alive=False),))
        assert isinstance(route, (Reject, ToUrl)), route
        if isinstance(route, Reject):
            assert route.status == 503
            assert route.message

    def test_an_answer_is_never_given_to_another_request(self) -> None:
        router = self.make()
        router.finished(REQUEST, ANSWER)
        others = (
            replace(REQUEST, prompts=((1, 2, 4),)),
            replace(REQUEST, prompts=((1, 2), (3,))),
            replace(REQUEST, model="other"),
            replace(REQUEST, cache_salt="tenant"),
            replace(REQUEST, kind="completion"),
            replace(REQUEST, n=2),
            replace(REQUEST, stop=("x",)),
            replace(REQUEST, echo=True),
            replace(REQUEST, fields={"skip_special_tokens": False}),
            replace(REQUEST, fields={"include_stop_str_in_output": True}),
            replace(REQUEST, sampling=SamplingParams(temperature=0.0, max_tokens=5)),
            replace(REQUEST, sampling=SamplingParams(temperature=0.0, max_tokens=4, logprobs=1)),
            replace(REQUEST, sampling=SamplingParams(temperature=0.0, max_tokens=4, logit_bias={5: 1.0})),
            replace(REQUEST, sampling=SamplingParams(temperature=1.0, max_tokens=4)),
        )
        for other in others:
            assert not isinstance(router.route(other, (ALIVE,)), Answer), other

    def test_an_answer_given_twice_is_the_answer_that_was_stored(self) -> None:
        router = self.make()
        router.finished(REQUEST, ANSWER)
        for request_id, stream in (("r2", False), ("r3", True)):
            route = router.route(replace(REQUEST, request_id=request_id, stream=stream), (ALIVE,))
            assert isinstance(route, (ToEngine, ToUrl)) or route == ANSWER

    def test_samples_without_a_seed_are_drawn_anew(self) -> None:
        router = self.make()
        free = replace(REQUEST, sampling=SamplingParams(temperature=0.8))
        router.finished(free, ANSWER)
        assert not isinstance(router.route(free, (ALIVE,)), Answer)
