"""Memory of a server that its engines inherit: it outlives them."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from engine.assembly.assemble import assemble
from engine.contracts.request import EngineRequest, SamplingParams
from engine.loop.client import EngineDead
from engine.startup.process import ProcessEngineClient
from engine.startup.segments import Segments, ServerMemory

COMMON = ["device=cpu", "threads=1", "model.max_len=512", "exporter=[]", "drafter=none"]
PROMPT = tuple(range(5, 405))
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def test_a_killed_engine_and_its_replica_load_what_it_computed() -> None:
    plan = assemble([*COMMON, "kv_store=[host]", "fleet.replicas=2"])

    async def served(client: ProcessEngineClient, name: str) -> tuple[tuple[int, ...], int]:
        """Its tokens, and how many of the prompt's were loaded."""
        outputs = [out async for out in client.submit(EngineRequest(name, PROMPT, ONE))]
        assert outputs[-1].timings is not None
        return tuple([token for out in outputs for token in out.tokens]), outputs[-1].timings.loaded_tokens

    async def scenario() -> None:
        memory = ServerMemory(plan)
        first, second = [ProcessEngineClient(plan, segments=memory.of(number)) for number in range(2)]
        info = await first.start()
        tokens, loaded = await served(first, "computed")
        assert loaded == 0
        await second.start()
        whole = (len(PROMPT) - 1) // 16 * 16
        assert await served(second, "replica") == (tokens, whole)
        os.kill(info.pid, signal.SIGKILL)
        with pytest.raises(EngineDead):
            while True:
                await served(first, "killed")
        await first.start()
        assert await served(first, "again") == (tokens, whole)
        for client in (first, second):
            await client.close()

    asyncio.run(scenario())


def test_there_is_such_memory_where_engines_of_one_rank_keep_records_on_this_machine() -> None:
    plan = assemble([*COMMON, "kv_store=[host]", "fleet.replicas=2"])
    segments = ServerMemory(plan).of(1)
    assert segments is not None and len(segments.files) == 2
    assert Segments.of(segments.words[1], int(segments.words[3])) == replace(segments, owner=None)
    assert ServerMemory(assemble(COMMON)).of(0) is None
    assert ServerMemory(replace(plan, launcher=plan.choice("parallelism"))).of(0) is None


def test_it_is_given_back_with_who_made_it() -> None:
    segments = ServerMemory(assemble([*COMMON, "kv_store=[host]"])).of(0)
    assert segments is not None
    (file,) = segments.files
    os.ftruncate(file, 4096)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(file, 0)
    del segments
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
