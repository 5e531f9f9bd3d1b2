"""A server's engine with several ranks, of which one dies or stops at some moment while requests run; again and again,
every rank in both ways as often.

python tools/benchmarks/dying_ranks.py 60 parallelism.tp=2 parallelism.timeout_s=6
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import product

from engine.assembly.assemble import assemble
from engine.contracts.request import EngineRequest, SamplingParams, TokensOut
from engine.loop.client import EngineDead
from engine.service import supervisor as supervising
from engine.service.supervisor import Supervisor
from engine.startup.process import ProcessEngineClient

BACK_S = 60.0
"""How long a new engine may take."""
ENDING_S = 5.0
"""How long processes may take to be gone once a new engine is there."""


@dataclass(frozen=True, slots=True)
class Death:
    """What came of one rank's death."""

    rank: int
    how: signal.Signals
    cause: str
    """As the engine told it."""
    errors: int
    """Streams that ended in an error."""
    causes: frozenset[str]
    """That these were told."""
    seconds: float
    """From the signal to the end of the last stream."""
    back_s: float
    """Until a new engine served."""
    left: tuple[int, ...]
    """Processes of the former engine that are still there."""


class Served:
    """An engine under its supervisor."""

    def __init__(
        self, client: ProcessEngineClient, supervisor: Supervisor, watching: asyncio.Task[None], timeout_s: float
    ) -> None:
        self.client = client
        self.timeout_s = timeout_s
        self.supervisor = supervisor
        self.watching = watching
        self._requests = 0

    @property
    def pids(self) -> list[int]:
        """By rank."""
        assert self.client.info is not None
        return [int(rank.place.removeprefix("pid ")) for rank in self.client.info.ranks]

    async def generate(self, num_tokens: int = 8) -> list[int]:
        """Of one request, alone."""
        return [token for out in await self._stream(num_tokens, 0) for token in out.tokens]

    async def die(self, rank: int, how: signal.Signals, rng: random.Random, requests: int = 6) -> Death:
        """Send a signal to a rank at some moment while requests run, and see what comes of it."""
        pids, seen = self.pids, self.client.num_messages
        streams = [asyncio.create_task(self._stream(2000, i)) for i in range(requests)]
        steps = seen + rng.randint(1, 60)
        while self.client.num_messages < steps:
            await asyncio.sleep(0.001)
        os.kill(pids[rank], how)
        began = time.monotonic()
        ended = await asyncio.gather(*streams, return_exceptions=True)
        seconds = time.monotonic() - began
        cause = self.client.cause_of_death
        async with asyncio.timeout(BACK_S):
            while self.client.info is None or not self.client.alive or self.pids == pids:
                assert not self.watching.done(), self.watching
                await asyncio.sleep(0.01)
        back_s = time.monotonic() - began
        errors = [one for one in ended if isinstance(one, EngineDead)]
        causes = frozenset(error.cause for error in errors)
        return Death(rank, how, cause, len(errors), causes, seconds, back_s, await _left(pids))

    async def _stream(self, num_tokens: int, seed: int) -> list[TokensOut]:
        self._requests += 1
        sampling = SamplingParams(
            max_tokens=num_tokens, ignore_eos=True, temperature=0.0 if seed % 2 else 1.0, seed=seed
        )
        prompt = tuple(random.Random(seed).randrange(4000) for _ in range(20 + seed))
        stream = self.client.submit(EngineRequest(f"r{self._requests}", prompt, sampling))
        return [out async for out in stream]


async def _left(pids: list[int]) -> tuple[int, ...]:
    ends = time.monotonic() + ENDING_S
    while (left := tuple(pid for pid in pids if os.path.exists(f"/proc/{pid}"))) and time.monotonic() < ends:
        await asyncio.sleep(0.05)
    return left


@contextlib.asynccontextmanager
async def served(*overrides: str) -> AsyncIterator[Served]:
    plan = assemble(["model.path=bundled", "device=cpu", "threads=1", "exporter=[]", *overrides])
    client = ProcessEngineClient(plan)
    supervisor = Supervisor(client, plan.settings.server.stall_s, serving_s=plan.stall_s, backoff_s=0.0)
    await supervisor.start()
    watching = asyncio.create_task(supervisor.watch())
    try:
        yield Served(client, supervisor, watching, plan.timeout_s)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await client.close()


async def main(count: int, overrides: list[str]) -> int:
    """How many deaths went otherwise than they should."""
    supervising.CRASH_WINDOW_S = 0.0  # no number of crashes is too many here
    rng, bad = random.Random(7), 0
    seconds: dict[str, list[float]] = {}
    async with served(*overrides) as engine:
        expected, timeout_s = await engine.generate(), engine.timeout_s
        ways = list(product(range(len(engine.pids)), (signal.SIGKILL, signal.SIGSTOP)))
        for i in range(count):
            if i % len(ways) == 0:
                rng.shuffle(ways)
            rank, how = ways[i % len(ways)]
            death = await engine.die(rank, how, rng)
            same, leased = await engine.generate() == expected, engine.client.stats.blocks_leased
            fine = death.errors == 6 and death.seconds <= timeout_s and not death.left and same and not leased
            bad += not fine
            seconds.setdefault(f"{how.name} of rank {rank}", []).append(death.seconds)
            print(f"{i + 1:3} {'ok ' if fine else 'BAD'} {death}", flush=True)
    for name, found in sorted(seconds.items()):
        found.sort()
        print(
            f"{name}: {len(found)} times, streams ended after {found[len(found) // 2]:.2f} s, at most {found[-1]:.2f} s"
        )
    print(f"{count - bad} of {count} as they should be; parallelism.timeout_s={timeout_s:g}")
    return bad


if __name__ == "__main__":
    sys.exit(bool(asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))))
