"""The process of a gateway."""

from __future__ import annotations

import asyncio

from engine.contracts.config import GatewaySettings, ServerSettings, Settings
from engine.http.gateway.server import Gateway

from ...service.fakes import in_loop
from .fakes import Backend, Client, Exchange, backends, first_ready, hang, until


def gateway_of(lines: list[str], *servers: Backend, port: int = 0) -> Gateway:
    settings = Settings(
        server=ServerSettings(port=port, drain_s=5.0, lame_duck_s=0.0),
        gateway=GatewaySettings(targets=[server.url for server in servers], probe_s=0.1),
    )
    return Gateway(settings, first_ready, (), say=lines.append)


@in_loop
async def test_it_says_which_targets_there_are_and_ends_with_0_after_a_signal() -> None:
    a, b, lines = Backend("a"), Backend("b"), list[str]()
    async with backends(a, b):
        gateway = gateway_of(lines, a, b)
        running = asyncio.create_task(gateway.run())
        await until(lambda: any(line.startswith("ready: ") for line in lines))
        assert lines[-1] == f"ready: gateway at http://127.0.0.1:{gateway.port}/v1"
        assert [line.split(": ")[0] for line in lines[:-1]] == [f"target {server.id}" for server in (a, b)]
        gateway.signalled()
        assert await running == 0


@in_loop
async def test_a_request_in_flight_is_finished_before_it_ends() -> None:
    answering = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await answering.wait()
        await exchange.answer()

    a, lines = Backend("a", then=slow), list[str]()
    async with backends(a):
        gateway = gateway_of(lines, a)
        running = asyncio.create_task(gateway.run())
        await until(lambda: any(line.startswith("ready: ") for line in lines))
        asked = asyncio.create_task(Client(gateway).ask())
        await until(lambda: bool(a.asked))
        gateway.signalled()
        await until(lambda: gateway.state.admission.draining)
        answering.set()
        assert (await asked).words == a.words
        assert await running == 0


@in_loop
async def test_a_second_signal_ends_what_is_in_flight() -> None:
    a, lines = Backend("a", then=hang), list[str]()
    async with backends(a):
        gateway = gateway_of(lines, a)
        running = asyncio.create_task(gateway.run())
        await until(lambda: any(line.startswith("ready: ") for line in lines))
        asked = asyncio.create_task(Client(gateway).ask())
        await until(lambda: bool(a.asked))
        gateway.signalled()
        gateway.signalled()
        outcome = await asked
        assert (outcome.kind, outcome.status) == ("error", 503) and b"shutdown" in outcome.body
        assert await running == 0


@in_loop
async def test_it_waits_for_targets_that_are_not_there_yet() -> None:
    a, lines = Backend("a", ready_status=503), list[str]()
    async with backends(a):
        gateway = gateway_of(lines, a)
        running = asyncio.create_task(gateway.run())
        await until(lambda: bool(a.probed))
        assert not lines
        a.ready_status = 200
        await until(lambda: any(line.startswith("ready: ") for line in lines))
        gateway.signalled()
        assert await running == 0
