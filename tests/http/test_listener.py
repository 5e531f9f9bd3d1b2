"""A process that answers HTTP, of which a gateway is the smallest: ``engine.http.listener``."""

from __future__ import annotations

import asyncio
import signal
import socket

import pytest

from engine.contracts.config import GatewaySettings, ServerSettings, Settings
from engine.http.gateway.server import Gateway
from engine.http.listener import Listener

from ..service.fakes import in_loop
from .gateway.fakes import first_ready, until


def listener(lines: list[str], *, host: str = "127.0.0.1", port: int = 0, lame_duck_s: float = 0.0) -> Listener:
    server = ServerSettings(host=host, port=port, lame_duck_s=lame_duck_s, drain_s=1.0)
    settings = Settings(server=server, gateway=GatewaySettings(targets=["http://127.0.0.1:1"], probe_s=0.1))
    return Gateway(settings, first_ready, (), say=lines.append)


@in_loop
async def test_a_port_that_is_taken_is_named_with_the_setting_to_change() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port, lines = taken.getsockname()[1], list[str]()
        assert await listener(lines, port=port).run() == 1
        assert f"server.port={port}" in lines[0] and lines[0].endswith("Choose another server.port.")


@in_loop
async def test_an_address_that_is_not_here_is_named_with_the_setting_to_change() -> None:
    lines: list[str] = []
    assert await listener(lines, host="203.0.113.1").run() == 1
    assert lines[0].endswith("Choose another server.host.")


@pytest.mark.parametrize(("number", "ducks"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
@in_loop
async def test_only_a_signal_of_an_orchestrator_is_followed_by_a_lame_duck(number: int, ducks: bool) -> None:
    lines: list[str] = []
    one = listener(lines, lame_duck_s=0.1)
    running = asyncio.create_task(one.run())
    await until(lambda: one.port != 0)
    one.signalled(number)
    assert await running == 0
    assert [line.partition(":")[0] for line in lines] == [*["lame duck"] * ducks, "draining"]


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_the_url_is_one_that_can_be_used(host: str, shown: str) -> None:
    assert listener([], host=host).url == f"http://{shown}:0"
