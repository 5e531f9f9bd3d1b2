"""Two engine processes behind a listener are restarted under load."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind_api
from engine.http.server import Server
from engine.service.start_check import load_tokenizer
from engine.startup.process import ProcessEngineClient
from engine.startup.replicas import engine_id, with_memory

from .fakes import Running, events_of

OVERRIDES = ["device=cpu", "threads=1", "model.max_len=256", "exporter=[]", "fleet.replicas=2", "server.port=0"]
QUESTIONS: list[dict[str, Any]] = [
    {"model": "bundled", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "n": n}
    for prompt, n in (("json.dumps", 1), ("A list is", 2), ("def open", 1))
]


def answered(stream: bool, body: bytes) -> tuple[str, tuple[str, ...]]:
    """The engine that served a request, and the text of each choice."""
    texts: dict[int, str] = {}
    engine = ""
    for part in events_of(body) if stream else [json.loads(body)]:
        for choice in part["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        engine = part.get("timings", {}).get("route", {}).get("engine", engine)
    return engine, tuple(text for _, text in sorted(texts.items()))


async def restarted_under_load() -> None:
    plan, lines = with_memory(assemble(OVERRIDES)), list[str]()
    clients = {engine_id(plan, each): ProcessEngineClient(plan) for each in range(2)}
    server = Server(plan, clients, bind_api(plan).router, [], load_tokenizer(plan), say=lines.append)
    serving = asyncio.create_task(server.run())
    while not any(line.startswith("ready: ") for line in lines):
        await asyncio.sleep(0.01)
        assert not serving.done(), lines
    asked, done = Running(server, None, None, None), asyncio.Event()  # type: ignore[arg-type]
    engines, texts = set[str](), {number: set[tuple[str, ...]]() for number in range(len(QUESTIONS))}
    answers = 0

    async def load(stream: bool) -> None:
        nonlocal answers
        while not done.is_set():
            for number, question in enumerate(QUESTIONS):
                status, _, body = await asked.post("/v1/completions", question | {"stream": stream})
                assert status == 200, body
                engine, found = answered(stream, body)
                engines.add(engine)
                texts[number].add(found)
                answers += 1

    async with asyncio.TaskGroup() as crowd:
        for number in range(4):
            crowd.create_task(load(stream=number % 2 == 0))
        assert (await asked.post("/engine/fleet/restart", b""))[0] == 202
        while (state := json.loads((await asked.get("/engine/fleet"))[2]))["change"]["state"] == "running":
            await asyncio.sleep(0.05)
        done.set()
    assert state["change"]["state"] == "done", state
    assert [each["starts"] for each in state["engines"]] == [2, 2]
    assert engines == set(clients) and answers > 20
    assert all(len(found) == 1 and len(*found) == QUESTIONS[number]["n"] for number, found in texts.items()), texts
    state = json.loads((await asked.get("/engine/fleet"))[2])
    assert [sum(each["load"].values()) for each in state["engines"]] == [0, 0]
    server.signalled()
    assert await serving == 0
    assert not any("error" in line for line in lines), lines


def test_engines_are_restarted_one_by_one_and_no_request_fails() -> None:
    asyncio.run(asyncio.wait_for(restarted_under_load(), 120))
