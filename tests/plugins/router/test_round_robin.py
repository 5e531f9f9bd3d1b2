from __future__ import annotations

from collections import Counter

from tests.plugins.router.fleets import Fleet, request, text

from engine.contracts.config import SlotConfig
from engine.testing.context import build_context
from engine.testing.router import RouterConformance
from engine_plugins.router.round_robin import RoundRobinRouter


def make() -> RoundRobinRouter:
    return RoundRobinRouter(SlotConfig(), build_context())


class TestConformance(RouterConformance):
    def make(self) -> RoundRobinRouter:
        return make()


def test_engines_take_turns_whatever_they_have_to_do():
    fleet = Fleet(make(), "abc")
    assert "".join(fleet.send(request(i, text(i, 1))) for i in range(7)) == "abcabca"


def test_the_turn_of_a_dead_engine_is_shared_by_the_others():
    fleet = Fleet(make(), "abcd", dead={"b"})
    sent = Counter(fleet.send(request(i, text(i, 1))) for i in range(12))
    assert sent == {"a": 4, "c": 4, "d": 4}


def test_the_next_ones_take_over_in_turn():
    fleet = Fleet(make(), "abc")
    fleet.send(request(0, text(0, 1)))
    assert fleet.ask(request(1, text(1, 1))).engines == ("b", "c", "a")
