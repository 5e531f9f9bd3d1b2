"""Servers that only speak the API, in the place of child processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from engine_lab.shared.servers import Key, Refused

TIMINGS = {"drafted_tokens": 0, "accepted_tokens": 0, "draft_chains": 0, "draft_ms": 0.0, "decode_ms": 0.01}
PLAN = {
    "plan": {
        "model": {"quantization": None, "vocab_size": 10, "hidden_size": 4, "tie_embeddings": True},
        "dtype": "float32",
        "device": {"name": "a CPU", "kind": "cpu"},
        "slots": {"quantizer": [{"name": "checkpoint"}]},
    },
    "engine": {
        "pid": -1,
        "num_blocks": [65],
        "kv_tokens": 1024,
        "block_size": 16,
        "weights_bytes": 4000,
        "kv_bytes": 9000,
        "ledger": None,
    },
}


class FakeEngine:
    """Answers every request with as many words as it may, five at most, and remembers what was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.broken = False

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/engine/plan", self.plan)
        app.router.add_post("/v1/chat/completions", self.answer)
        return app

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def plan(self, request: web.Request) -> web.Response:
        return web.json_response(PLAN)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.broken:
            return web.json_response({"error": {"message": "broken"}}, status=500)
        words = ["word "] * min(5, body["max_tokens"])
        usage = {"prompt_tokens": len(body["messages"][0]["content"]), "completion_tokens": len(words)}
        logprobs = {"content": [{"token": word, "top_logprobs": [{"logprob": -1}, {"logprob": -3}]} for word in words]}
        if not body["stream"]:
            choice = {"message": {"content": "".join(words)}, "finish_reason": "stop", "logprobs": logprobs}
            return web.json_response({"choices": [choice], "usage": usage, "timings": TIMINGS})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for word in words:
            await response.write(b"data: " + json.dumps({"choices": [{"delta": {"content": word}}]}).encode() + b"\n\n")
        end = {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": usage, "timings": TIMINGS}
        await response.write(b"data: " + json.dumps(end).encode() + b"\n\ndata: [DONE]\n\n")
        return response


class FakeServers:
    """Stands for child processes: all are one engine. Refuses overrides with ``bad``."""

    engine = FakeEngine()
    kept: ClassVar[list[Sequence[Key]]] = []
    closed = 0

    def __init__(self, session: aiohttp.ClientSession, config_dirs: Sequence[str], logs: Path) -> None:
        self.server: TestServer | None = None

    def running(self) -> frozenset[Any]:
        return frozenset({self.server} - {None})

    async def keep(self, wanted: Sequence[Key]) -> list[str]:
        self.kept.append(wanted)
        if any("bad" in word for words, _ in wanted for word in words):
            raise Refused("note\nbad=1: no such key")
        if self.server is None:
            self.server = TestServer(self.engine.app())
            await self.server.start_server()
        return [str(self.server.make_url("")).rstrip("/") for _ in wanted]

    async def close(self) -> None:
        type(self).closed += 1
        if self.server is not None:
            await self.server.close()
            self.server = None
