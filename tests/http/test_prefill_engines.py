"""Engine processes of which one computes prompts for the other: the text is that of an engine that does all itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.addresses import free_addresses

from .fakes import Running
from .test_rolling_restart import GREEDY, PATH, serving, state_of


def question(number: int) -> dict[str, Any]:
    words = " ".join(f"def f{number}_{at}(x): return json.dumps(x, indent={at % 9})" for at in range(3 + number % 5))
    return {**GREEDY, "prompt": f"{number} {words}"}


async def asked(server: Running, numbers: range) -> list[dict[str, Any]]:
    found = []
    for number in numbers:
        status, _, body = await server.post(PATH, question(number))
        assert status == 200, body
        found.append(json.loads(body))
    return found


async def kill_again_and_again(server: Running, ended: asyncio.Event) -> int:
    """The engine for prompts, whenever it is up. Returns how often."""
    kills = set[int]()
    while not ended.is_set():
        engine = (await state_of(server))["engines"][1]
        assert engine["role"] == "prefill"
        if engine["ready"] and engine["pid"] not in kills and len(kills) < 2:
            await asyncio.sleep(0.3)
            kills.add(engine["pid"])
            os.kill(engine["pid"], signal.SIGKILL)
        await asyncio.sleep(0.05)
    return len(kills)


@pytest.mark.parametrize("num_prompts", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_texts_are_equal_with_an_engine_for_prompts_and_when_it_is_killed(num_prompts: int, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t" * 32)
    stores = (
        "kv_store=[host,peer]", "kv_store.host.max_bytes=67108864",
        f"kv_store.peer.peers=[{','.join(free_addresses(2))}]", f"kv_store.peer.token_file={tmp_path / 'token'}",
        "fleet.replicas=2", "fleet.prefill=1", "fleet.prefill_tokens=32",
    )  # fmt: skip

    async def run() -> None:
        async with serving() as server:
            expected = await asked(server, range(num_prompts))
        async with serving(*stores) as server:
            found = await asked(server, range(num_prompts))
            ended = asyncio.Event()
            killing = asyncio.create_task(kill_again_and_again(server, ended))
            rounds = 0
            meanwhile: list[dict[str, Any]] = []
            while rounds == 0 or (await state_of(server))["engines"][1]["starts"] < 2:
                meanwhile += await asked(server, range(num_prompts))
                rounds += 1
            ended.set()
            assert await killing >= 1
            loads = [engine["load"] for engine in (await state_of(server))["engines"]]
        texts = [each["choices"][0]["text"] for each in expected]
        assert [each["choices"][0]["text"] for each in found] == texts
        assert [each["choices"][0]["text"] for each in meanwhile] == texts * rounds
        assert {each["timings"]["route"]["engine"] for each in found} == {"replica-0"}
        assert all("prompt computed by replica-1" in each["timings"]["route"]["reason"] for each in found)
        assert sum(each["timings"]["loaded_tokens"] > 0 for each in found) >= num_prompts / 2
        assert loads == [{"sequences": 0, "queued_tokens": 0, "running_tokens": 0}] * 2
        print([each["timings"] for each in found])

    asyncio.run(asyncio.wait_for(run(), 300))
