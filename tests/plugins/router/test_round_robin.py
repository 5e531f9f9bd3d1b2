from __future__ import annotations

from dataclasses import replace

from engine.contracts.config import SlotConfig
from engine.contracts.router import Attempts
from engine.testing.context import build_context
from engine.testing.router import ALIVE, REQUEST, RouterConformance
from engine_plugins.router.round_robin import RoundRobinRouter


def make() -> RoundRobinRouter:
    return RoundRobinRouter(SlotConfig(), build_context())


class TestConformance(RouterConformance):
    def make(self) -> RoundRobinRouter:
        return make()


def test_engines_take_turns_and_those_that_are_not_alive_are_passed_over():
    router, fleet = make(), tuple(replace(ALIVE, engine_id=name) for name in "abc")
    without_b = tuple(replace(engine, alive=engine.engine_id != "b") for engine in fleet)
    sent = []
    for engines in (fleet, fleet, fleet, fleet, without_b, without_b, fleet):
        route = router.place(REQUEST, engines)
        assert isinstance(route, Attempts)
        sent.append(route.engines[0])
        router.begun(REQUEST, route.engines[0])
    assert "".join(sent) == "abcacab"
