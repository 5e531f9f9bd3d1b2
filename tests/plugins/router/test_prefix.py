from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from engine.contracts.router import ApiRequest, Attempts, EngineView
from engine.testing.context import build_context
from engine.testing.router import ALIVE, REQUEST, RouterConformance
from engine_plugins.router.prefix import PrefixConfig, PrefixRouter

BLOCK = 16
A, B = (replace(ALIVE, engine_id=name, block_size=BLOCK) for name in "ab")


def make(max_blocks: int = 1000) -> PrefixRouter:
    return PrefixRouter(PrefixConfig(max_blocks=max_blocks), build_context())


def asks(*prompts: Sequence[int], name: str = "r", salt: str = "") -> ApiRequest:
    return replace(REQUEST, request_id=name, prompts=tuple(map(tuple, prompts)), cache_salt=salt)


def placed(router: PrefixRouter, request: ApiRequest, *fleet: EngineView) -> Attempts:
    route = router.place(request, fleet)
    assert isinstance(route, Attempts)
    return route


def sent(router: PrefixRouter, request: ApiRequest, *fleet: EngineView) -> str:
    first = placed(router, request, *fleet).engines[0]
    router.begun(request, first)
    return first


class TestConformance(RouterConformance):
    def make(self) -> PrefixRouter:
        return make()


def test_a_prompt_goes_where_its_beginning_is_cached():
    router, said = make(), list(range(100))
    first = sent(router, asks(said, name="r0"), A, B)
    other = sent(router, asks(range(500, 600), name="r1"), A, B)
    assert first != other, "equal engines take turns"
    for turn in range(2, 6):
        said += range(1000 * turn, 1000 * turn + 40)
        route = placed(router, asks(said, name=f"r{turn}"), A, B)
        assert route.engines == (first, other)
        assert route.cached_tokens == ((len(said) - 40) // BLOCK * BLOCK,)
        assert f"{route.cached_tokens[0]} of {len(said)} prompt tokens cached" in route.reason
        router.begun(asks(said, name=f"r{turn}"), first)


def test_a_whole_prompt_that_is_cached_has_its_last_token_computed():
    router, said = make(), range(4 * BLOCK)
    sent(router, asks(said, name="r0"), A, B)
    assert placed(router, asks(said, name="r1"), A, B).cached_tokens == (4 * BLOCK - 1,)


def test_a_prefix_that_all_share_does_not_send_all_to_one_engine():
    router, shared = make(), tuple(range(640))
    fleet, took = {"a": A, "b": B}, Counter[str]()
    for number in range(40):
        request = asks((*shared, 9000 + number, *range(64)), name=f"r{number}")
        route = placed(router, request, *fleet.values())
        name, hit = route.engines[0], route.cached_tokens[0]
        router.begun(request, name)
        took[name] += 1
        busy, new = fleet[name], len(request.prompts[0]) - hit
        fleet[name] = replace(busy, sequences=busy.sequences + 1, queued_tokens=busy.queued_tokens + new)
    assert min(took.values()) >= 10, took


def test_tenants_share_no_prefix():
    router, said = make(), range(100)
    first = sent(router, asks(said, name="r0", salt="one"), A, B)
    assert placed(router, asks(said, name="r1", salt="two"), A, B).cached_tokens == (0,)
    assert placed(router, asks(said, name="r2", salt="one"), A, B).engines[0] == first


def test_an_engine_that_was_started_again_has_nothing_cached():
    router, said = make(), range(100)
    assert sent(router, asks(said, name="r0"), A, B) == "a"
    again = replace(A, starts=2)
    assert placed(router, asks(said, name="r1"), again, replace(B, alive=False)).cached_tokens == (0,)
    router.begun(asks(said, name="r1"), "a")
    assert placed(router, asks(said, name="r2"), again, B).cached_tokens == (96,)


def test_asking_where_to_go_remembers_nothing():
    router, said = make(), range(100)
    for turn in range(4):
        assert placed(router, asks(said, name=f"r{turn}"), A, B).cached_tokens == (0,)


def test_what_was_used_least_recently_is_forgotten_from_its_end():
    router = make(max_blocks=10)
    one, two = range(6 * BLOCK + 1), range(1000, 1000 + 6 * BLOCK + 1)
    busy = replace(B, sequences=99)
    for name, said in (("r0", one), ("r1", two)):
        assert sent(router, asks(said, name=name), A, busy) == "a"
    assert placed(router, asks(one, two), A, busy).cached_tokens == (4 * BLOCK, 6 * BLOCK)


def test_every_prompt_of_a_request_counts():
    router = make()
    sent(router, asks(range(100), name="r0"), A, B)
    route = placed(router, asks(range(100), range(200, 300), name="r1"), A, B)
    assert route.engines[0] == "a" and route.cached_tokens == (96, 0)


def test_with_one_engine_nothing_is_remembered():
    router = make()
    sent(router, asks(range(100), name="r0"), A)
    assert placed(router, asks(range(100), name="r1"), A, B).cached_tokens == (0,)
