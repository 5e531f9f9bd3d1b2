"""Whatever targets do, and however their faults meet: an answer is the whole of one target's, or an error."""

from __future__ import annotations

import asyncio
import random

import pytest

from engine.http.gateway.passing import MOST_BREAKS

from ...service.fakes import in_loop
from .fakes import APIS, OLLAMA, Backend, Client, Exchange, Fault, before, body_for, healthy, request_bytes, until

NUM_REQUESTS, NUM_CLIENTS = 120, 12


def misbehaving(rng: random.Random) -> Fault:
    """A server that does something else each time: a random part of an answer, and a random end."""

    async def fault(exchange: Exchange) -> None:
        status = rng.choice([200, 200, 200, 200, 408, 429, 500, 503, 307])
        if status != 200:
            await exchange.refuse(status, rng.choice(["x", "context_length_exceeded"]))
            return
        if rng.random() < 0.3:
            await exchange.answer()
            return
        if exchange.asked.streams:
            pieces = exchange.stream[: rng.randint(0, len(exchange.stream))]
            if exchange.asked.path != OLLAMA:
                pieces = [b": keepalive\n"] * rng.randint(0, 2) + pieces
            if rng.random() < 0.5:
                pieces = [b"".join(pieces)] if pieces else []
            await exchange.begin()
            await exchange.pieces(*pieces)
        else:
            length = rng.randint(0, len(exchange.whole))
            await exchange.head(200, "Content-Type: application/json", f"Content-Length: {len(exchange.whole)}")
            await exchange.send(exchange.whole[:length])
        match rng.choice(["cut", "cut", "reset", "end", "hang"]):
            case "cut":
                exchange.cut()
            case "reset":
                exchange.reset()
            case "end" if exchange.asked.streams:
                await exchange.end()
            case _:
                await exchange.until_gone()

    return fault


async def hangs_up(client: Client, path: str, stream: bool, rng: random.Random) -> None:
    """A client that leaves before, or in the middle of, the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.gateway.port)
    writer.write(request_bytes("POST", path, body_for(path, stream)))
    await writer.drain()
    if rng.random() < 0.5:
        await reader.read(rng.randint(1, 500))
    writer.close()


@pytest.mark.parametrize("seed", range(4))
@in_loop
async def test_an_answer_is_the_whole_of_one_targets_or_an_error(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.http.gateway.passing.WAIT_S", 0.2)
    monkeypatch.setattr("engine.service.targets.PAUSE_S", 0.05)
    rng = random.Random(seed)
    servers = [Backend(name, then=misbehaving(rng)) for name in "ab"]
    servers.append(Backend("c", [misbehaving(rng)] * 10, then=healthy))
    kinds: list[str] = []

    async with before(*servers, first_byte_s=0.2, silence_s=0.2) as client:

        async def ask() -> None:
            path, stream = rng.choice(APIS), rng.random() < 0.7
            if rng.random() < 0.1:
                return await hangs_up(client, path, stream, rng)
            outcome = await client.ask(path, stream)
            kinds.append(outcome.kind)
            said = outcome.words
            if outcome.kind == "answer":
                assert said in [server.words for server in servers]
            else:
                assert outcome.kind == "error", outcome
                assert any(said == server.words[: len(said)] for server in servers), outcome

        async def ask_again_and_again() -> None:
            for _ in range(NUM_REQUESTS // NUM_CLIENTS):
                await ask()

        await asyncio.gather(*[ask_again_and_again() for _ in range(NUM_CLIENTS)])
        state = client.gateway.state
        await until(lambda: state.admission.in_flight == 0)
        assert {"answer", "error"} <= {*kinds}, "there was something to see"
        asked = sum(len(server.asked) for server in servers)
        assert asked < NUM_REQUESTS * (len(servers) + MOST_BREAKS), "no request goes round and round"
