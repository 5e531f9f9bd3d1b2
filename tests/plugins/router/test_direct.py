from __future__ import annotations

from dataclasses import replace

from engine.contracts.config import SlotConfig
from engine.contracts.router import Attempts, Reject
from engine.testing.context import build_context
from engine.testing.router import ALIVE, REQUEST, RouterConformance
from engine_plugins.router.direct import DirectRouter

CONTEXT = build_context()


class TestConformance(RouterConformance):
    def make(self) -> DirectRouter:
        return DirectRouter(SlotConfig(), CONTEXT)


def test_the_first_engine_alive_is_taken_then_the_next_one():
    fleet = tuple(
        replace(ALIVE, engine_id=name, alive=alive) for name, alive in (("a", False), ("b", True), ("c", True))
    )
    assert DirectRouter(SlotConfig(), CONTEXT).place(REQUEST, fleet) == Attempts(("b", "c"), "the first")


def test_without_an_engine_the_client_is_told_when_to_come_back():
    route = DirectRouter(SlotConfig(), CONTEXT).place(REQUEST, ())
    assert isinstance(route, Reject)
    assert route.status == 503
    assert route.retry_after_s is not None and route.retry_after_s > 0
