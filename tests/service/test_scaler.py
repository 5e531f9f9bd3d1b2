"""The rule's decisions change engines, and requests wait for the first one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engine.contracts.config import AutoscaleSettings
from engine.service import fleet as fleet_module
from engine.service import scaler as module
from engine.service.fleet import Fleet
from engine.service.load import Share
from engine.service.scaler import Scaler

from .fakes import in_loop
from .test_dispatch import Fleet as Engines
from .test_fleet import done, until


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "POLL_S", 0.001)
    monkeypatch.setattr(module, "POLL_S", 0.001)


@asynccontextmanager
async def scaled(least: int, most: int) -> AsyncIterator[tuple[Engines, Fleet, Scaler]]:
    """Engines of which the fewest are up."""
    engines = Engines("ab"[:most])
    settings = AutoscaleSettings(min=least, max=most, up_after_s=1.0, down_after_s=5.0)
    fleet = Fleet(engines.engines, drain_s=1.0, at_start=least)
    for engine in engines.engines.values():
        if engine.state != "stopped":
            await engine.supervisor.start()
    yield engines, fleet, Scaler(settings, fleet, engines.engines)
    await fleet.close()


def states(engines: Engines) -> list[str]:
    return [engine.state for engine in engines.engines.values()]


@in_loop
async def test_engines_come_and_go_with_the_load_and_each_change_says_why() -> None:
    async with scaled(1, 2) as (engines, fleet, scaler):
        assert (states(engines), fleet.desired, fleet.reason) == (["ready", "stopped"], 1, "as started")
        shares = [Share(engines.engines["a"].load, 10, 0) for _ in range(32)]
        assert scaler.look(0.0) is None and scaler.look(1.0) is not None
        assert fleet.change is not None and fleet.change.reason == fleet.reason == "no row or KV block left for 1 s"
        assert scaler.look(1.1) is None, "one change at a time"
        assert await done(fleet.change) == [("b", "restarting"), ("b", "ready")]
        assert (states(engines), fleet.desired) == (["ready", "ready"], 2)
        for share in shares:
            share.end()
        for now_s, changes in ((2.0, False), (6.9, False), (7.0, True)):
            assert (scaler.look(now_s) is not None) is changes
        await done(fleet.change)
        assert (states(engines), fleet.reason) == (["ready", "stopped"], "idle for 5 s")


@in_loop
async def test_the_engine_that_goes_is_the_one_that_is_missed_least() -> None:
    async with scaled(1, 2) as (engines, fleet, _):
        await done(fleet.scale(2, "for a test"))
        Share(engines.engines["b"].load, 10, 0)
        await done(fleet.scale(1, "for a test"))
        assert states(engines) == ["stopped", "ready"]
        await done(fleet.scale(2, "for a test"))
        assert states(engines) == ["ready", "ready"]


@in_loop
async def test_requests_wait_for_an_engine_where_there_may_be_none() -> None:
    async with scaled(0, 1) as (engines, _, scaler):
        assert scaler.is_asleep and states(engines) == ["stopped"]
        waiting = [asyncio.create_task(scaler.until_up()) for _ in range(3)]
        await until(lambda: scaler.held == 3)
        decision = scaler.look(time.monotonic())
        assert decision is not None and decision.reason == "3 requests wait for an engine"
        await asyncio.gather(*waiting)
        assert (scaler.held, scaler.is_asleep, states(engines)) == (0, False, ["ready"])
        await scaler.until_up()


@in_loop
async def test_a_client_that_goes_away_waits_no_longer() -> None:
    async with scaled(0, 1) as (_, _, scaler):
        waiting = asyncio.create_task(scaler.until_up())
        await until(lambda: scaler.held)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert scaler.held == 0 and scaler.look(0.0) is None


@in_loop
async def test_nobody_waits_for_an_engine_that_does_not_come() -> None:
    async with scaled(0, 1) as (engines, fleet, scaler):
        waiting = asyncio.create_task(scaler.until_up())
        await until(lambda: scaler.held)
        engines.engines["a"].supervisor.state = "failed"
        await waiting
        await fleet.close()
        engines.engines["a"].supervisor.state = "stopped"
        await scaler.until_up()
        assert scaler.look(0.0) is None, "the server ends"


@in_loop
async def test_without_autoscale_nothing_waits_and_nothing_changes() -> None:
    engines = Engines()
    fleet = Fleet(engines.engines, 1.0)
    scaler = Scaler(AutoscaleSettings(), fleet, engines.engines)
    await scaler.run()
    await scaler.until_up()
    assert (scaler.is_on, scaler.least, scaler.is_asleep, fleet.change) == (False, 1, False, None)
