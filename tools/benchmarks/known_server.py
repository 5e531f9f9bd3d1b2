"""A server whose capacity is known, to measure load generators with: rows that answer at a fixed pace, and a queue.

    python tools/benchmarks/known_server.py --port 8001 --rows 8 --token-ms 10
    engine bench --url http://127.0.0.1:8001 --endpoint completions --sweep --output-tokens 20

A request waits for a row and then gets a token every ``--token-ms``: with answers of N tokens it serves
rows / (N x token-ms) requests a second. It computes nothing. On a machine that others use, start
both with real-time priority (``chrt -f 10``).
"""

from __future__ import annotations

import argparse
import asyncio
import json

from aiohttp import web


class KnownServer:
    def __init__(self, rows: int, token_s: float) -> None:
        self._rows, self._token_s = asyncio.Semaphore(rows), token_s

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**28)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/v1/chat/completions", self.complete)
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "known", "object": "model"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        is_chat, tokens = "messages" in asked, int(asked.get("max_tokens", 16))
        prompt = str(asked["messages"] if is_chat else asked["prompt"])
        usage = {"prompt_tokens": max(1, len(prompt) // 4), "completion_tokens": tokens}
        if not asked.get("stream"):
            return web.json_response({"choices": [], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async with self._rows:
            due = asyncio.get_running_loop().time()
            for number in range(1, tokens + 1):
                due += self._token_s
                await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
                text = {"delta": {"content": "a "}} if is_chat else {"text": "a "}
                end = {"finish_reason": "length" if number == tokens else None}
                await _event(response, {"choices": [{"index": 0, **text, **end}]})
        await _event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


async def _event(response: web.StreamResponse, data: object) -> None:
    await response.write(b"data: " + json.dumps(data).encode() + b"\n\n")


async def _app(rows: int, token_s: float) -> web.Application:
    return KnownServer(rows, token_s).app()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--token-ms", type=float, default=10.0)
    options = parser.parse_args()
    web.run_app(_app(options.rows, options.token_ms / 1e3), host="127.0.0.1", port=options.port)


if __name__ == "__main__":
    main()
