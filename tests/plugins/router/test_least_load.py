from __future__ import annotations

from collections import Counter

from tests.plugins.router.fleets import Fleet, request, text

from engine.contracts.config import SlotConfig
from engine.testing.context import build_context
from engine.testing.router import RouterConformance
from engine_plugins.router.least_load import LeastLoadRouter


def make() -> LeastLoadRouter:
    return LeastLoadRouter(SlotConfig(), build_context())


class TestConformance(RouterConformance):
    def make(self) -> LeastLoadRouter:
        return make()


def test_the_engine_with_the_fewest_sequences_is_the_first_and_the_others_follow():
    fleet = Fleet(make(), "abc")
    for name in "abcab":
        assert fleet.send(request(f"{name}{len(fleet.shares)}", text(1, 1))) == name
    route = fleet.ask(request("next", text(1, 1)))
    assert route.engines == ("c", "a", "b") and route.reason == "1 sequence, 16 tokens in flight"


def test_of_equal_numbers_of_sequences_the_fewest_tokens_decide():
    fleet = Fleet(make(), "abc")
    for i, blocks in enumerate((3, 9, 2)):
        fleet.send(request(i, text(i, blocks)))
    assert fleet.ask(request("next", text(9, 1))).engines == ("c", "a", "b")


def test_every_choice_counts_as_a_sequence():
    fleet = Fleet(make(), "ab")
    assert fleet.send(request("several", text(1, 1), n=3)) == "a"
    assert [fleet.send(request(i, text(i, 5))) for i in range(4)] == ["b", "b", "b", "a"]


def test_requests_that_come_one_at_a_time_are_spread_evenly():
    fleet = Fleet(make(), "abcd")
    assert Counter(fleet.serve(request(i, text(i, 1))) for i in range(40)) == dict.fromkeys("abcd", 10)


def test_a_dead_engine_gets_nothing_though_it_has_nothing_to_do():
    fleet = Fleet(make(), "abc", dead={"a"})
    assert {fleet.send(request(i, text(i, 1))) for i in range(10)} == {"b", "c"}
