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

HERE = {"n": 2, "cache_salt": "here"}
"""What is computed where it is decoded, and finds nothing that another engine has computed."""
NOTHING = {"sequences": 0, "queued_tokens": 0, "running_tokens": 0}


async def asked(server: Running, num_prompts: int, **options: Any) -> list[dict[str, Any]]:
    found = []
    for number in range(num_prompts):
        code = " ".join(f"def f{number}_{at}(x): return json.dumps(x, indent={at})" for at in range(3 + number % 5))
        status, _, body = await server.post(PATH, {**GREEDY, "prompt": f"{number} {code}", **options})
        assert status == 200, body
        found.append(json.loads(body))
    return found


def texts(answers: list[dict[str, Any]]) -> list[str]:
    return [answer["choices"][0]["text"] for answer in answers]


async def for_prompts(server: Running) -> dict[str, Any]:
    """The state of that engine."""
    _, engine = (await state_of(server))["engines"]
    assert engine["role"] == "prefill"
    return engine


@pytest.mark.parametrize(
    ("store", "num_prompts", "kills"),
    [
        ("host", 4, 1),
        pytest.param("host", 50, 3, marks=pytest.mark.slow),
        pytest.param("peer", 50, 3, marks=pytest.mark.slow),
    ],
)
def test_texts_are_equal_with_an_engine_for_prompts_and_when_it_is_killed(
    store: str, num_prompts: int, kills: int, tmp_path: Path
) -> None:
    overrides = [
        "fleet.replicas=2", "fleet.prefill=1", "fleet.prefill_tokens=32",
        "kv_store=[host]", "kv_store.host.max_bytes=67108864",
    ]  # fmt: skip
    if store == "peer":
        (tmp_path / "token").write_text("t" * 32)
        overrides += ["kv_store=[host,peer]", f"kv_store.peer.token_file={tmp_path / 'token'}"]
        overrides += [f"kv_store.peer.peers=[{','.join(free_addresses(2))}]"]

    async def run() -> None:
        async with serving(*overrides) as server:
            while not (await for_prompts(server))["ready"]:
                await asyncio.sleep(0.05)
            found = await asked(server, num_prompts)
            expected = texts(await asked(server, num_prompts, **HERE))
            assert texts(found) == expected
            for answer in found:
                route = answer["timings"]["route"]
                assert route["engine"] == "replica-0" and "prompt computed by replica-1" in route["reason"]
            assert any(answer["timings"]["loaded_tokens"] for answer in found)
            for number in range(kills):
                while num_prompts > 4 and not (await for_prompts(server))["ready"]:
                    assert texts(await asked(server, num_prompts, cache_salt=f"down {number}")) == expected
                asking = asyncio.create_task(asked(server, num_prompts, cache_salt=f"killed {number}"))
                await asyncio.sleep(0.02)
                os.kill((await for_prompts(server))["pid"], signal.SIGKILL)
                assert texts(await asking) == expected
            assert [engine["load"] for engine in (await state_of(server))["engines"]] == [NOTHING] * 2

    asyncio.run(asyncio.wait_for(run(), 300))
