from __future__ import annotations

from collections import Counter
from dataclasses import replace

from engine.contracts.config import SlotConfig
from engine.contracts.router import Attempts
from engine.testing.context import build_context
from engine.testing.router import ALIVE, REQUEST, RouterConformance
from engine_plugins.router.least_load import LeastLoadRouter


def make() -> LeastLoadRouter:
    return LeastLoadRouter(SlotConfig(), build_context())


class TestConformance(RouterConformance):
    def make(self) -> LeastLoadRouter:
        return make()


def test_the_fewest_sequences_come_first_then_the_fewest_tokens():
    fleet = (
        replace(ALIVE, engine_id="a", sequences=2),
        replace(ALIVE, engine_id="b", sequences=1, running_tokens=50),
        replace(ALIVE, engine_id="c", sequences=1, queued_tokens=40),
        replace(ALIVE, engine_id="d", sequences=0, alive=False),
    )
    assert make().place(REQUEST, fleet) == Attempts(("c", "b", "a"), "1 sequences")


def test_equal_engines_are_sent_equally_much():
    router, fleet = make(), tuple(replace(ALIVE, engine_id=name) for name in "abc")
    sent = Counter[str]()
    for _ in range(9):
        route = router.place(REQUEST, fleet)
        assert isinstance(route, Attempts)
        router.begun(REQUEST, route.engines[0])
        sent[route.engines[0]] += 1
    assert sent == {"a": 3, "b": 3, "c": 3}
