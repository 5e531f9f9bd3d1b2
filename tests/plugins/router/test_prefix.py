from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from tests.plugins.router.fleets import BLOCK, Fleet, request, text

import engine_plugins.router.prefix as module
from engine.contracts.request import SamplingParams
from engine.contracts.router import Attempts
from engine.testing.context import build_context
from engine.testing.router import ALIVE, REQUEST, RouterConformance
from engine_plugins.router.prefix import STEP_SEQUENCES, Index, PrefixConfig, PrefixRouter, chains_of


def make(max_blocks: int = 10_000) -> PrefixRouter:
    return PrefixRouter(PrefixConfig(max_blocks), build_context())


class TestConformance(RouterConformance):
    def make(self) -> PrefixRouter:
        return make(32_768)


def test_a_conversation_returns_to_its_engine():
    fleet, rng = Fleet(make(), "abcdefgh"), random.Random(0)
    chats = {name: text(name, 8) for name in range(20)}
    places: dict[int, set[str]] = {name: set() for name in chats}
    for turn in range(200):
        name = rng.choice(list(chats))
        places[name].add(fleet.serve(request(turn, chats[name])))
        chats[name] += text(1000 + turn, 3)
    assert {len(found) for found in places.values()} == {1}
    assert len(set().union(*places.values())) > 4


def test_what_is_cached_is_said_of_each_prompt_and_in_words():
    fleet = Fleet(make(), "abc")
    first = fleet.serve(request("first", text(1, 8)))
    route = fleet.ask(request("next", text(1, 8) + text(2, 2)[:20], text(3, 1)))
    assert route.engines[0] == first and set(route.engines) == set("abc")
    assert route.cached_tokens == (8 * BLOCK, 0)
    assert route.reason == "128 of 164 tokens cached, 0 sequences"


def test_the_last_token_of_a_prompt_is_always_computed():
    fleet = Fleet(make(), "ab")
    fleet.serve(request("first", text(1, 4)))
    assert fleet.ask(request("again", text(1, 4))).cached_tokens == (4 * BLOCK - 1,)


def test_without_anything_shared_load_is_spread_evenly():
    fleet = Fleet(make(), "abcd")
    assert Counter(fleet.send(request(i, text(i, 4))) for i in range(40)) == dict.fromkeys("abcd", 10)
    idle = Fleet(make(), "abcd")
    assert Counter(idle.serve(request(i, text(i, 4))) for i in range(40)) == dict.fromkeys("abcd", 10)


def test_a_hot_prefix_does_not_pile_up_on_one_engine():
    """All prompts begin alike: the first engine that has computed it would win by prefix alone. It gets sequences until
    they make up for how much longer a whole prompt is than what is new of it, then the next one computes it, too."""
    fleet, most = Fleet(make(), "abcd"), 3 * STEP_SEQUENCES  # of prompts that are four times as long
    for i in range(8 * most):
        asked = request(i, text(0, 6) + text(1 + i, 2))
        fleet.send(asked)
        fleet.begin(asked)
        assert max(load.sequences for load in fleet.loads.values()) <= max(most, i // 4 + most)
    assert [load.sequences for load in fleet.loads.values()] == [2 * most] * 4


def test_a_prefix_is_computed_again_where_its_engine_has_too_much_to_do():
    fleet = Fleet(make(), "ab")
    home = fleet.serve(request("first", text(1, 8)))
    others = [request(i, text(100 + i, 8)) for i in range(30)]
    places = [fleet.send(asked) for asked in others]
    for asked, place in zip(others, places, strict=True):
        if place != home:
            fleet.end(asked)
    assert fleet.ask(request("next", text(1, 8))).engines[0] != home


def test_tenants_share_nothing():
    fleet = Fleet(make(), "ab")
    fleet.serve(request("mine", text(1, 8), salt="me"))
    assert fleet.ask(request("theirs", text(1, 8), salt="them")).cached_tokens == (0,)
    assert fleet.ask(request("again", text(1, 8), salt="me")).cached_tokens == (8 * BLOCK - 1,)
    assert fleet.ask(replace(request("other", text(1, 8), salt="me"), model="other")).cached_tokens == (0,)


def test_an_engine_that_was_started_again_has_nothing():
    fleet = Fleet(make(), "ab")
    home = fleet.serve(request("first", text(1, 8)))
    fleet.starts[home] += 1
    assert fleet.ask(request("next", text(1, 8))).cached_tokens == (0,)
    fleet.router.begun(request("next", text(1, 8)), "a")
    fleet.router.begun(request("next", text(1, 8)), "b")
    assert fleet.ask(request("last", text(1, 8))).cached_tokens == (8 * BLOCK - 1,)


def test_a_dead_engine_gets_nothing_and_is_remembered_no_longer():
    fleet = Fleet(make(), "abc")
    home = fleet.serve(request("first", text(1, 8)))
    fleet.dead = {home}
    route = fleet.ask(request("next", text(1, 8)))
    assert home not in route.engines and route.cached_tokens == (0,)
    fleet.serve(request("other", text(2, 8)))
    fleet.dead = set()
    assert fleet.ask(request("last", text(1, 8))).cached_tokens == (0,)


def test_an_engine_that_takes_over_is_remembered_though_others_were_placed_since():
    fleet = Fleet(make(), "ab")
    moved = request("moved", text(1, 8))
    first = fleet.send(moved)
    other = "b" if first == "a" else "a"
    fleet.serve(request("later", text(2, 8)))
    fleet.router.begun(moved, other)
    fleet.dead = {first}
    assert fleet.ask(request("next", text(1, 8))) == Attempts(
        (other,), "127 of 128 tokens cached, 0 sequences", (8 * BLOCK - 1,)
    )


def test_prompts_are_hashed_once_a_request_and_never_with_one_engine(monkeypatch):
    hashed = []

    def counted(asked, size):
        hashed.append(asked.request_id)
        return chains_of(asked, size)

    monkeypatch.setattr(module, "chains_of", counted)
    fleet, alone = Fleet(make(), "abcdefgh"), Fleet(make(), "a")
    for name in "xyz":
        fleet.serve(request(name, text(1, 8)))
        alone.serve(request("alone", text(1, 8)))
    assert hashed == ["x", "y", "z"]
    assert alone.ask(request("next", text(1, 8))) == Attempts(("a",), "the first")


def test_a_router_that_is_left_with_one_engine_forgets_all():
    fleet = Fleet(make(), "ab")
    fleet.serve(request("first", text(1, 8)))
    loads = dict(fleet.loads)
    del fleet.loads["b"]
    fleet.serve(request("alone", text(1, 8)))
    fleet.loads = loads
    assert fleet.ask(request("next", text(1, 8))).cached_tokens == (0,)


def test_engines_with_blocks_of_different_sizes_are_each_asked_for_theirs():
    router = make()
    fleet = tuple([replace(ALIVE, engine_id=name, block_size=size) for name, size in (("a", 16), ("b", 64))])
    prompt = text(1, 7)  # 112 tokens
    router.place(request("first", prompt), fleet)
    router.begun(request("first", prompt), "b")
    route = router.place(request("next", prompt), fleet)
    assert isinstance(route, Attempts) and route.engines == ("b", "a") and route.cached_tokens == (64,)


def test_an_index_forgets_the_least_recently_used_and_ends_of_prompts_first():
    chains = [chains_of(request(seed, text(seed, 10)), BLOCK)[0] for seed in range(3)]
    index = Index(1)
    for chain in (chains[0], chains[1], chains[0][:4], chains[2]):
        index.add(chain, 16)
    assert [index.find(chain) for chain in chains] == [4, 2, 10]


def test_what_an_index_finds_is_what_it_would_find_block_by_block():
    rng, index = random.Random(2), Index(1)
    chains = [
        chains_of(request(i, text(rng.randrange(3), rng.randint(1, 9)) + text(10 + rng.randrange(9), 9)), BLOCK)[0]
        for i in range(60)
    ]
    for _ in range(600):
        index.add(rng.choice(chains), 50)
        chain = rng.choice(chains)
        there = [key in index.keys for key in chain]
        assert index.find(chain) == sum(there) == (there.index(False) if False in there else len(there))
        assert len(index.keys) <= 50


def test_of_a_request_without_end_only_the_beginning_is_hashed():
    blocks = module.MOST_HASHED
    many = request("many", *[tuple(range(BLOCK * 8))] * blocks)
    assert sum(map(len, chains_of(many, BLOCK))) == blocks
    long = request("long", tuple(range(BLOCK * (blocks + 9))))
    assert [len(chain) for chain in chains_of(long, BLOCK)] == [blocks]


def test_choices_of_a_prompt_are_as_many_prompts():
    """What is new counts once for each, as it does in the counts of the fleet."""
    fleet = Fleet(make(), "ab")
    fleet.send(request("waits", text(1, 10)))
    assert fleet.loads["a"].queued_tokens == 10 * BLOCK
    fleet.send(request("several", text(2, 2), n=4))
    assert (fleet.loads["b"].sequences, fleet.loads["b"].queued_tokens) == (4, 8 * BLOCK)


def test_a_bound_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"router\.max_blocks=0: expected at least 1"):
        PrefixConfig(0)


def test_sampling_does_not_matter():
    fleet = Fleet(make(), "ab")
    fleet.serve(request("first", text(1, 8)))
    sampled = replace(REQUEST, prompts=(text(1, 8),), sampling=SamplingParams(temperature=1.0))
    assert fleet.ask(sampled).cached_tokens == (8 * BLOCK - 1,)
