"""What a run is made of, in every command that makes some."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

from engine_lab.bench.run import watched


def test_the_watch_on_the_client_ends_with_its_run_however_that_ends():
    async def failing() -> None:
        async with watched(time.perf_counter):
            assert not gc.isenabled() and len(asyncio.all_tasks()) == 2
            raise RuntimeError("the load failed")

    async def watch() -> None:
        with pytest.raises(RuntimeError, match="the load failed"):
            await failing()
        assert gc.isenabled() and len(asyncio.all_tasks()) == 1

    asyncio.run(watch())
