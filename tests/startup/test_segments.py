"""Memory of a server that its engines inherit: it outlives them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace

import pytest
from msgspec import structs

from engine.assembly.assemble import assemble
from engine.contracts.request import EngineRequest, SamplingParams
from engine.loop.client import EngineDead
from engine.ranks.messages import OpenMemory
from engine.startup.process import ProcessEngineClient
from engine.startup.segments import Segments, ServerMemory, of_all_ranks, opened
from engine_plugins.kv_store.segment import LAST

COMMON = ["device=cpu", "threads=1", "model.max_len=512", "exporter=[]", "drafter=none"]
PROMPT = tuple(range(5, 405))
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("engines", ["fleet.replicas=2", "parallelism.tp=2"])
def test_a_killed_engine_and_its_replica_load_what_it_computed(engines: str) -> None:
    plan = assemble([*COMMON, "kv_store=[host]", engines])
    replicas = plan.settings.fleet.replicas

    async def served(client: ProcessEngineClient, name: str) -> tuple[tuple[int, ...], int]:
        """Its tokens, and how many of the prompt's were loaded."""
        outputs = [out async for out in client.submit(EngineRequest(name, PROMPT, ONE))]
        assert outputs[-1].timings is not None
        return tuple([token for out in outputs for token in out.tokens]), outputs[-1].timings.loaded_tokens

    async def scenario() -> None:
        memory = ServerMemory(plan)
        (file, *_) = memory._files
        first, *others = [ProcessEngineClient(plan, segments=memory.of(number)) for number in range(replicas)]
        info = await first.start()
        tokens, loaded = await served(first, "computed")
        assert loaded == 0
        whole = (len(PROMPT) - 1) // 16 * 16
        for second in others:
            await second.start()
            assert await served(second, "replica") == (tokens, whole)
        async with asyncio.timeout(20.0):  # until all records have their headers
            while int.from_bytes(os.pread(file, 8, 8 * LAST), sys.byteorder) < len(PROMPT) // 16:
                await asyncio.sleep(0.01)
        os.kill(info.pid, signal.SIGKILL)
        with pytest.raises(EngineDead):
            while True:
                await served(first, "killed")
        await first.start()
        assert await served(first, "again") == (tokens, whole)
        for client in (first, *others):
            await client.close()

    asyncio.run(scenario())


def test_there_is_such_memory_where_all_ranks_of_engines_keep_records_on_this_machine() -> None:
    plan = assemble([*COMMON, "kv_store=[host]", "fleet.replicas=2"])
    segments = ServerMemory(plan).of(1)
    assert segments is not None and len(segments.files) == 2
    assert Segments.of(segments.words[1], int(segments.words[3])) == replace(segments, owner=None)
    assert ServerMemory(assemble(COMMON)).of(0) is None
    assert ServerMemory(replace(plan, launcher=plan.choice("parallelism"))).of(0) is None
    ranks = ["kv_store=[host]", "parallelism.tp=2", "communicator=gloo", "parallelism=join"]
    assert ServerMemory(assemble([*COMMON, *ranks])).of(0) is not None
    assert ServerMemory(assemble([*COMMON, *ranks, "parallelism.nodes=2"])).of(0) is None


def test_an_engine_waits_for_the_ranks_of_the_one_before_it() -> None:
    segments = ServerMemory(assemble([*COMMON, "kv_store=[host]"])).of(0)
    assert segments is not None
    opening = of_all_ranks(segments.files[0], 0.0)
    assert opening is not None
    ranks = [opened(opening), opened(opening)]
    for rank in ranks:
        assert of_all_ranks(segments.files[0], 0.05) is None
        os.close(rank)
    assert of_all_ranks(segments.files[0], 0.0) == opening
    for wrong in (
        structs.replace(opening, identity=("", *opening.identity[1:])),
        OpenMemory("/proc/0/fd/0", ("", 0, 0)),
    ):
        with pytest.raises(OSError, match="cannot be opened as memory of rank 0"):
            opened(wrong)


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
