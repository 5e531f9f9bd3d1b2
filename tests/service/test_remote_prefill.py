"""A prompt that another engine computes first: the answer is the same whatever becomes of that."""

from __future__ import annotations

import asyncio

import pytest

from engine.contracts.config import FleetSettings
from engine.contracts.router import Attempts
from engine.service import remote_prefill
from engine.service.engines import EngineHandle
from engine.service.load import Load

from .fakes import ScriptedClient, in_loop, make_plan, make_tokenizer
from .test_dispatch import Fleet, texts
from .test_sending import nothing_is_left

PLAN = make_plan(fleet=FleetSettings(replicas=3, prefill=1, prefill_tokens=1))


async def started() -> Fleet:
    """Engines ``a`` and ``b`` decode, ``p`` computes prompts."""
    fleet = Fleet("abp")
    for number, (name, client) in enumerate(fleet.clients.items()):
        role = PLAN.settings.fleet.role(number)
        fleet.engines[name] = EngineHandle(name, PLAN, client, make_tokenizer(), role)
    await fleet.start()
    fleet.router.decision = Attempts(("a", "b"))
    return fleet


def prefill_of(fleet: Fleet) -> ScriptedClient:
    return fleet.clients["p"]


@in_loop
async def test_the_engine_that_decodes_begins_when_the_prompt_is_computed() -> None:
    fleet = await started()
    prefill, decodes = prefill_of(fleet), fleet.clients["a"]
    prefill.hold_before = 0
    job = fleet.job(cache_salt="mine")
    running = asyncio.create_task(texts(fleet, job))
    await prefill.holding.wait()
    assert decodes.requests == [] and fleet.engines["p"].load == Load(sequences=1, queued_tokens=2)
    prefill.proceeding.set()
    assert await running == ["I am a"]
    (asked,), (whole,) = prefill.requests, decodes.requests
    assert (asked.prompt, asked.cache_salt, asked.sampling.max_tokens) == (whole.prompt, "mine", 0)
    assert whole.prefilled and not asked.prefilled
    assert nothing_is_left(fleet) and fleet.router.told == ["a"]


@pytest.mark.parametrize("how", ["dies", "is down", "is late", "fails"])
@in_loop
async def test_an_engine_that_does_not_compute_a_prompt_changes_nothing(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = await started()
    prefill = prefill_of(fleet)
    if how == "is down":
        prefill.die()
    elif how == "fails":
        prefill.fail_request = "no room"
    else:
        prefill.hold_before = 0
    if how == "is late":
        monkeypatch.setattr(remote_prefill, "UNKNOWN_S", 0.01)
    running = asyncio.create_task(texts(fleet, fleet.job()))
    if how == "dies":
        await prefill.holding.wait()
        prefill.die()
    assert await running == ["I am a"]
    assert nothing_is_left(fleet) and not fleet.clients["a"].requests[0].prefilled
    if how == "is late":
        await prefill.abort_seen.wait()


@in_loop
async def test_a_client_that_leaves_ends_the_prompt_and_what_decodes() -> None:
    fleet = await started()
    for held, name in (("p", "-prefill"), ("a", "")):
        client = fleet.clients[held]
        client.hold_before = 0
        job = fleet.job()
        running = asyncio.create_task(texts(fleet, job))
        await client.holding.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert client.aborted == [(f"{job.name(0)}{name}", "abort")], client.aborted
        assert nothing_is_left(fleet)
        client.hold_before = None
    assert len(fleet.clients["a"].requests) == 1, "it is sent nothing that was left before"


@in_loop
async def test_a_sequence_whose_engine_dies_meanwhile_moves_on() -> None:
    fleet = await started()
    prefill = prefill_of(fleet)
    prefill.hold_before = 0
    running = asyncio.create_task(texts(fleet, fleet.job()))
    await prefill.holding.wait()
    fleet.clients["a"].die()
    prefill.proceeding.set()
    assert await running == ["I am b"]
    assert nothing_is_left(fleet)


@in_loop
async def test_prompts_are_computed_where_they_are_decoded_if_little_is_missing_or_several_share_them() -> None:
    fleet = await started()
    fleet.router.decision = Attempts(("a",), cached_tokens=(1,))
    assert await texts(fleet, fleet.job()) == ["I am a"]
    fleet.router.decision = Attempts(("a",))
    assert await texts(fleet, fleet.job(n=2, cache_salt="two")) == ["I am a"] * 2
    assert await texts(fleet, fleet.job()) == ["I am a"], "it has had this prompt"
    assert prefill_of(fleet).requests == []
    assert await texts(fleet, fleet.job(cache_salt="another")) == ["I am a"]
    assert len(prefill_of(fleet).requests) == 1


@in_loop
async def test_an_engine_for_prompts_decodes_where_no_other_one_is_left() -> None:
    fleet = await started()
    fleet.router.decision = Attempts(("a",))
    assert await texts(fleet, fleet.job()) == ["I am a"]
    for name in "ab":
        fleet.clients[name].die()
    fleet.router.decision = Attempts(("p",))
    assert await texts(fleet, fleet.job()) == ["I am p"]
    assert [[engine.engine_id for engine in seen] for seen in fleet.router.fleets] == [["a", "b"], ["a", "b", "p"]]
