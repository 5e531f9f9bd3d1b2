"""The stores of a running server: whether they pay, which bound is next, and prompts that fill them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace
from tests.lab.fleet.test_main import served

from engine.cli.main import main
from engine.loop.messages import EngineStats, StoreState
from engine.loop.staging import SKIPPED
from engine_lab.shared.live import LiveError
from engine_plugins.kv_store.command import live
from engine_plugins.kv_store.command.folder import FolderError
from engine_plugins.kv_store.command.main import _print

STATE = StoreState(
    "host", 100, 900, 1000, 7, 0, loads=3, loaded_tokens=4096, stored_bytes=5000, saved_s=12.5,
    skipped=dict.fromkeys(SKIPPED, 0) | {"late": 2},
)  # fmt: skip


def stores(*states: StoreState) -> tuple[live.Store, ...]:
    return msgspec.convert(msgspec.to_builtins(states), tuple[live.Store, ...])


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (STATE, "It pays: 4,096 tokens were loaded instead of computed, which saved at least 12.5 s."),
        (replace(STATE, unpriced_tokens=4096), "Not known yet: 4,096 tokens"),
        (replace(STATE, saved_s=-1.0), "It does not pay: 4,096 tokens"),
        (replace(STATE, loaded_tokens=0), "Nothing was loaded yet"),
        (replace(STATE, loaded_tokens=0, stored_bytes=0, records=0), "Nothing is stored yet"),
    ],
)
def test_it_says_whether_stores_pay(state: StoreState, says: str) -> None:
    assert live.verdict(stores(state)).startswith(says)


def test_the_next_bound_is_named_with_what_to_set() -> None:
    disk = replace(STATE, name="disk", num_bytes=10, evicted=0)
    assert "kv_store.host.max_bytes=2000" in live.bound(stores(STATE, disk), 500)
    assert "smaller than the KV pool" in live.bound(stores(STATE, disk), 4000)
    assert live.bound(stores(STATE, replace(disk, faults=3)), 500).startswith("disk had 3 faults")
    assert live.bound(stores(replace(STATE, num_bytes=1), disk), 500).startswith("none is near")
    assert {*live.REASONS} == {*SKIPPED} and live.skips(stores(STATE, disk))[0].startswith("4 times")
    assert live.verdict(()) and live.bound((), 1) == "" and live.skips(()) == ()


def test_a_server_is_asked_and_filled(tmp_path: Path, capsys) -> None:
    with served() as (server, clients, _):
        clients["a"].stats = EngineStats(1.0, 9, stores=(STATE,))
        assert main(["kv", "stats", server.url]) == 0
        shown = capsys.readouterr().out
        assert "It pays" in shown and "Next bound: host is full (90%)" in shown and "came too late" in shown
        file = tmp_path / "prompts"
        file.write_text('A prompt.\n\n{"messages": [{"role": "user", "content": "Hi"}]}\n[{"role": "nobody"}]\n')
        assert main(["kv", "warm", str(file), server.url]) == 1
        shown = capsys.readouterr()
        assert "2 prompts" in shown.out and "1 failed" in shown.out and "prompt 3: 400" in shown.err


@pytest.mark.parametrize(("status", "body"), [(400, '{"error": "no"}'), (502, "[]"), (200, "null"), (200, "[" * 5000)])
def test_what_other_servers_answer_is_shown(status: int, body: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("A prompt.\n")

    async def answer(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"data": [{"id": "m"}]})
        return web.Response(status=status, text=body)

    async def asked() -> live.Warmed:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            return await live.warm(session, str(server.make_url("")), None, file)

    (error,) = {*asyncio.run(asked()).errors}
    assert error.startswith(f"prompt 1: {status}: b") and body[:9] in error


def test_an_engine_that_is_starting_is_not_said_to_have_no_stores() -> None:
    class Server:
        url = "http://here"

        async def chosen(self, name: str | None) -> tuple[Server, str]:
            return self, ""

        async def fleet(self) -> dict[str, dict[str, object]]:
            return {"a": {"state": "restarting", "ready": False}}

        async def json(self, path: str) -> dict[str, object]:
            return {"engine": "a"}

    with pytest.raises(LiveError, match="engine a is restarting; ask again when it is ready"):
        asyncio.run(live.report(Server(), None))  # type: ignore[arg-type]


def test_words_in_brackets_are_printed(capsys) -> None:
    found = live.Report("a", 0, 0, (), 0, live.verdict(()), "", (), "")
    _print(found, "http://here")
    assert "kv_store=[host] keeps" in capsys.readouterr().out


def test_a_line_that_is_no_prompt_is_named(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    for line, says in (
        ("{", "expected a prompt, or JSON"),
        ('{"text": 1}', "expected messages or prompt; it has text"),
    ):
        file.write_text(f"good\n{line}\n")
        with pytest.raises(FolderError, match=rf"prompts:2: {says}"):
            list(live.prompts(file))
