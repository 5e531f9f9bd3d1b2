"""Engine processes behind a listener are restarted: two under load, and the only one by force."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind_api
from engine.http.server import Server
from engine.service.start_check import load_tokenizer
from engine.startup.process import ProcessEngineClient
from engine.startup.replicas import engine_id, with_memory
from engine.startup.segments import ServerMemory

from .fakes import Running, events_of

OVERRIDES = ["device=cpu", "threads=1", "model.max_len=256", "exporter=[]", "server.port=0"]
PATH = "/v1/completions"
GREEDY = {"model": "bundled", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
QUESTIONS: list[dict[str, Any]] = [
    {**GREEDY, "prompt": prompt, "n": n} for prompt, n in (("json.dumps", 1), ("A list is", 2), ("def open", 1))
]


@asynccontextmanager
async def serving(*overrides: str) -> AsyncIterator[Running]:
    """A server and its engine processes, until a signal has ended it."""
    plan, lines = with_memory(assemble([*OVERRIDES, *overrides])), list[str]()
    names = [engine_id(plan, each) for each in range(plan.settings.fleet.replicas)]
    memory = ServerMemory(plan)
    clients = {name: ProcessEngineClient(plan, segments=memory.of(at)) for at, name in enumerate(names)}
    server = Server(plan, clients, bind_api(plan).router, [], load_tokenizer(plan), say=lines.append)
    ended = asyncio.create_task(server.run())
    while not any(line.startswith("ready: ") for line in lines):
        await asyncio.sleep(0.01)
        assert not ended.done(), lines
    yield Running(server, None, None, None)  # type: ignore[arg-type]
    server.signalled()
    assert await ended == 0 and not any("error" in line for line in lines), lines


async def state_of(server: Running) -> Any:
    return json.loads((await server.get("/engine/fleet"))[2])


async def restarted(server: Running, query: str = "") -> Any:
    """The fleet's state after a restart."""
    status, _, body = await server.post(f"/engine/fleet/restart{query}", b"")
    assert status == 202, body
    while (state := await state_of(server))["change"]["state"] == "running":
        await asyncio.sleep(0.05)
    assert state["change"]["state"] == "done", state
    return state


def answered(stream: bool, body: bytes) -> tuple[str, tuple[str, ...]]:
    """The engine that served a request, and the text of each choice."""
    texts: dict[int, str] = {}
    engine = ""
    for part in events_of(body) if stream else [json.loads(body)]:
        for choice in part["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        engine = part.get("timings", {}).get("route", {}).get("engine", engine)
    return engine, tuple(text for _, text in sorted(texts.items()))


async def two_under_load() -> None:
    async with serving("fleet.replicas=2") as server:
        engines, texts = set[str](), {number: set[tuple[str, ...]]() for number in range(len(QUESTIONS))}
        done, answers = asyncio.Event(), 0

        async def load(stream: bool) -> None:
            nonlocal answers
            while not done.is_set():
                for number, question in enumerate(QUESTIONS):
                    status, _, body = await server.post(PATH, question | {"stream": stream})
                    assert status == 200, body
                    engine, found = answered(stream, body)
                    engines.add(engine)
                    texts[number].add(found)
                    answers += 1

        async with asyncio.TaskGroup() as crowd:
            for number in range(4):
                crowd.create_task(load(stream=number % 2 == 0))
            state = await restarted(server)
            done.set()
        assert [each["starts"] for each in state["engines"]] == [2, 2]
        assert engines == {"replica-0", "replica-1"} and answers > 20
        assert all(len(found) == 1 and len(*found) == QUESTIONS[number]["n"] for number, found in texts.items()), texts
        loads = [each["load"] for each in (await state_of(server))["engines"]]
        assert [sum(load.values()) for load in loads] == [0, 0]


async def one_by_force() -> None:
    async with serving("server.drain_s=0.05") as server:
        before = answered(False, (await server.post(PATH, QUESTIONS[0]))[2])
        assert (await server.post("/engine/fleet/restart", b""))[0] == 409
        long = asyncio.create_task(server.post(PATH, QUESTIONS[0] | {"max_tokens": 240, "stream": True}))
        while not (await state_of(server))["engines"][0]["load"]["running_tokens"]:
            assert not long.done()
        state = await restarted(server, "?force=1")
        steps = [each["step"] for each in state["change"]["steps"]]
        assert steps == ["draining", "aborting", "restarting", "ready"]
        assert b'"code":"engine_closed"' in (await long)[2]
        assert (state["engines"][0]["starts"], sum(state["engines"][0]["load"].values())) == (2, 0)
        assert answered(False, (await server.post(PATH, QUESTIONS[0]))[2]) == before


@pytest.mark.slow
def test_the_only_engine_is_restarted_by_force_and_what_runs_ends_with_an_error() -> None:
    asyncio.run(asyncio.wait_for(one_by_force(), 120))


@pytest.mark.slow
def test_engines_are_restarted_one_by_one_under_load_and_no_request_fails() -> None:
    asyncio.run(asyncio.wait_for(two_under_load(), 240))
