"""A conversation goes on after its server was ended: what was said is found by its id, keys and values in stores."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind_api
from engine.assembly.errors import AssemblyError
from engine.http.server import Server
from engine.service.start_check import load_tokenizer
from engine.startup.inprocess import InprocessEngineClient

from ..service.fakes import in_loop
from .fakes import Running

OVERRIDES = ["device=cpu", "threads=1", "exporter=[]", "server.port=0", "batches.path=none", "kv_store=[host,disk]"]
FIRST = "Write a function that parses a file of JSON lines, and say what each of its lines does. " * 8
ASKED = {"temperature": 0, "max_output_tokens": 24}


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Running]:
    own = [f"server.store_path={folder / 'responses'}", f"kv_store.disk.path={folder / 'kv'}"]
    plan = assemble([*OVERRIDES, "kv_store.host.max_bytes=33554432", *own])
    client = InprocessEngineClient(plan)
    server = Server(plan, {"default": client}, bind_api(plan).router, [], load_tokenizer(plan), say=lambda line: None)
    await server.listen()
    await server.state.engine.supervisor.start()
    yield Running(server, None, None, None)  # type: ignore[arg-type]
    await server.close()


async def respond(server: Running, text: str, **fields: Any) -> tuple[int, Any]:
    status, _, body = await server.post("/v1/responses", {"model": "bundled", "input": text, **ASKED, **fields})
    return status, json.loads(body)


def cached(answer: Any) -> int:
    return int(answer["usage"]["input_tokens_details"]["cached_tokens"])


@in_loop
async def restored(folder: Path) -> None:
    async with serving(folder) as server:
        _, first = await respond(server, FIRST)
        _, expected = await respond(server, "And then?", previous_response_id=first["id"])
        assert cached(expected) > 100
    async with serving(folder) as server:
        status, found = await respond(server, "And then?", previous_response_id=first["id"])
        assert status == 200 and found["output"][0]["content"] == expected["output"][0]["content"]
        assert cached(found) == cached(expected) // 16 * 16, "whole blocks, from the disk"
        status, refused = await respond(server, "And?", previous_response_id=first["id"], cache_salt="another")
        assert (status, refused["error"]["code"]) == (404, "previous_response_not_found")
        _, other = await respond(server, FIRST, cache_salt="another")
        assert cached(other) == 0
    with closing(sqlite3.connect(folder / "responses" / "responses.db")) as db, db:
        db.execute("UPDATE turns SET owner = NULL")
    with pytest.raises(AssemblyError, match=r"server.store_path=.*/responses: a row of responses.db is damaged"):
        async with serving(folder):
            ...


def test_a_conversation_goes_on_after_a_restart_for_its_tenant_alone(tmp_path: Path) -> None:
    restored(tmp_path)
