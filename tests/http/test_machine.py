from __future__ import annotations

import asyncio
import json
from itertools import count

import pytest

from engine.http import machine
from engine.machine import MachineTimes, Meter

from ..service.fakes import in_loop
from .fakes import running


@in_loop
async def test_the_history_of_an_engine_has_the_cpus_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = count()

    def read(meter: Meter) -> MachineTimes:
        at_s = next(seconds)
        return MachineTimes(at_s, 2, ran_s=0.5 * at_s, waited_s=0.25 * at_s, others_s=1.25 * at_s, stolen_s=0.25 * at_s)

    monkeypatch.setattr(Meter, "read", read)
    monkeypatch.setattr(machine, "PERIOD_S", 0.1)
    async with running() as server:
        columns = {"cpus_used": [None]}
        while columns["cpus_used"][-1] is None:
            await asyncio.sleep(0.02)
            columns = json.loads((await server.get("/engine/history"))[2])["columns"]
        assert (columns["cpus_used"][-1], columns["cpus_others"][-1], columns["machine_busy"][-1]) == (0.5, 1.5, True)
