"""A rank that dies or stops ends every stream in an error, within ``parallelism.timeout_s``; a new engine serves."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from tools.benchmarks.dying_ranks import BACK_S, Served, served

from engine.service import supervisor

TIMEOUT_S = 5.0
ALL = list(product((0, 1), (signal.SIGKILL, signal.SIGSTOP)))
AFTER = list(product((2, 3), (signal.SIGKILL, signal.SIGSTOP)))


@pytest.fixture(autouse=True)
def any_number_of_crashes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "CRASH_WINDOW_S", 0.0)
        yield


async def assert_a_death_is_told(engine: Served, rank: int, how: signal.Signals, rng: random.Random) -> None:
    expected, sockets = await engine.generate(), num_sockets()
    death = await engine.die(rank, how, rng, requests=4)
    assert death.errors == 4, death
    assert death.seconds < 2 * TIMEOUT_S, death  # how near to it depends on who else runs
    assert death.left == (), death
    if rank:
        said = "ended with signal 9" if how is signal.SIGKILL else "has said nothing for"
        assert death.cause.startswith(f"rank {rank} (pid ") and said in death.cause, "the guilty one comes first"
    driver = "engine_dead" if how is signal.SIGKILL else "engine_stalled"
    assert death.causes == {"rank_failed" if rank else driver}, death
    assert await engine.generate() == expected, death
    stats = engine.client.stats
    assert (stats.running, stats.blocks_leased, stats.rows_used) == (0, 0, 0), stats
    assert num_sockets() == sockets, death


def num_sockets() -> int:
    """That this process holds."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
        except OSError:
            continue
    return found


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize(
    ("sizes", "deaths"),
    [
        ("parallelism.tp=2 kv_store=[host]", [(1, signal.SIGKILL)]),
        pytest.param("parallelism.tp=2", [(0, signal.SIGSTOP), (1, signal.SIGSTOP)], marks=pytest.mark.slow),
        pytest.param("parallelism.pp=2", ALL, marks=pytest.mark.slow),
        pytest.param("parallelism.tp=2 parallelism.pp=2", [*ALL, *AFTER], marks=pytest.mark.slow),
    ],
)
def test_whichever_rank_dies_or_stops_every_stream_ends_in_an_error(
    sizes: str, deaths: list[tuple[int, signal.Signals]], capfd: pytest.CaptureFixture[str]
) -> None:
    segments = sorted(Path("/dev/shm").iterdir())
    pids = asyncio.run(kill_each(sizes, deaths))
    assert "Traceback" not in capfd.readouterr().err, "the line of the engine's death says it, and no code is to blame"
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert sorted(Path("/dev/shm").iterdir()) == segments


async def kill_each(sizes: str, deaths: list[tuple[int, signal.Signals]]) -> list[int]:
    """Returns the processes of the last engine."""
    rng = random.Random(len(sizes))
    async with served(*sizes.split(), "communicator=shm", f"parallelism.timeout_s={TIMEOUT_S}") as engine:
        for rank, how in deaths:
            await assert_a_death_is_told(engine, rank, how, rng)
        if len(deaths) > 1:  # a rank that dies with nothing to do: see test_joining.py, too
            await assert_an_idle_rank_is_replaced(engine)
        return engine.pids


async def assert_an_idle_rank_is_replaced(engine: Served) -> None:
    """Before anybody asks for anything."""
    pids = engine.pids
    os.kill(pids[1], signal.SIGKILL)
    async with asyncio.timeout(BACK_S):
        while not engine.client.alive or engine.pids == pids:
            await asyncio.sleep(0.01)
    assert len(await engine.generate()) == 8
