"""The recorded mixture again, and what clients could do otherwise."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import aiohttp
from msgspec.structs import replace
from tests.lab.conftest import Served
from tests.lab.doctor.cases import engine
from tests.lab.doctor.test_classes import request

from engine_lab.doctor.classes import Recorded
from engine_lab.doctor.evidence import Evidence
from engine_lab.doctor.replay import CHANGES, Replay, part_of, recorded

MIXED = [
    Recorded(0.02 * number, prompt, cached, 4, 4, number % 2 == 0, 1.0, 1.0, 5.0, "", 0.5)
    for number, (prompt, cached) in enumerate([(30, 0), (30, 15), (160, 0), (30, 15), (30, 0), (160, 80)])
]


def test_a_run_has_the_recorded_mixture_of_lengths(served: Served) -> None:
    async def send() -> None:
        async with aiohttp.ClientSession() as session:
            records = await Replay(session, 0).send(served.url, MIXED, "salt", 1)
        assert len(records) == len(MIXED)

    asyncio.run(send())
    sent = [each for each in served.running.client.requests if each.cache_salt == "salt"]
    assert len(sent) == len(MIXED) and all(each.sampling.ignore_eos for each in sent)
    assert [each.sampling.temperature for each in sent] == [0.5] * len(MIXED)
    ratios = [len(each.prompt) / recorded.prompt_tokens for each, recorded in zip(sent, MIXED, strict=True)]
    assert max(ratios) <= 1.2 * min(ratios)


def test_prompts_begin_alike_for_as_much_as_was_cached() -> None:
    prompts = [each.prompt for each in Replay(None, 0).prompts(MIXED, 1)]  # type: ignore[arg-type]
    assert [len(prompt) for prompt in prompts] == [each.prompt_tokens for each in MIXED]
    assert prompts[1][:15] == prompts[3][:15] == prompts[5][:15] and prompts[1][:25] != prompts[3][:25]
    assert prompts[0][:10] != prompts[4][:10]
    assert prompts == [each.prompt for each in Replay(None, 0).prompts(MIXED, 1)]  # type: ignore[arg-type]
    assert prompts != [each.prompt for each in Replay(None, 0).prompts(MIXED, 2)]  # type: ignore[arg-type]


def test_prompts_begin_alike_as_they_did_where_nothing_was_cached() -> None:
    nothing = [replace(each, cached_tokens=0) for each in MIXED]
    found = Evidence(engine(), [{"shared_share": 0.4}, {"shared_share": 0.6}])
    assert [each.cached_tokens for each in recorded(replace(found, requests=nothing), 4)] == [80, 15, 15, 80]
    assert recorded(replace(found, requests=MIXED), 4) == part_of(MIXED, 4)


def test_what_clients_could_do_changes_what_it_is_about_alone() -> None:
    assert {each.cached_tokens for each in CHANGES["share"](MIXED)} == {27, 144}
    assert all(each.stream for each in CHANGES["stream"](MIXED))
    assert {each.prompt_tokens for each in CHANGES["without_long"](MIXED)} == {30}
    bursts = [request(), request(), Recorded(3.0, 60, 0, 4, 4, True, 1.0, 1.0, 5.0)]
    assert [each.at_s for each in CHANGES["spread"](bursts)] == [0.0, 1.5, 3.0]


def test_a_part_is_the_last_requests_and_begins_at_once() -> None:
    part = part_of(MIXED[::-1], 4)
    assert part[0].at_s == 0.0 and [each.prompt_tokens for each in part] == [160, 30, 30, 160]
    assert all(one.at_s <= two.at_s for one, two in pairwise(part))


def test_a_part_begins_with_the_queue_that_was_there() -> None:
    """Eight clients that wait for answers, of which the engine gives one at a time, each after 10 ms."""
    waiting = [
        replace(MIXED[0], at_s=0.01 * max(0, number - 7), e2e_ms=10.0 * min(8, number + 1)) for number in range(40)
    ]
    part = part_of(waiting, 20)
    assert [each.at_s for each in part[:8]] == [0.0] * 8 and len(part) == 27
    gaps = [two.at_s - one.at_s for one, two in pairwise(part[7:])]
    assert max(gaps) - min(gaps) < 1e-9
