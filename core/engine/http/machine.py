"""How busy this machine is, for the history of its engines."""

from __future__ import annotations

import asyncio
import time

from engine.http.state import ServerState
from engine.machine import MachineTimes, MachineUse, use
from engine.service.errors import ApiError
from engine.service.history import PERIOD_S


async def watch_machine(state: ServerState) -> None:
    """Until it is cancelled. Reads in the middle of each period, so that each has one reading though the event loop may
    be late."""
    before: MachineTimes | None = None
    while True:
        await asyncio.sleep(PERIOD_S - (time.monotonic() - PERIOD_S / 2) % PERIOD_S)
        now = await asyncio.to_thread(state.machine.read)
        if before is not None:
            await _keep(state, use(before, now))
        before = now


async def _keep(state: ServerState, found: MachineUse) -> None:
    others = None if found.others is None else found.others + (found.stolen or 0.0) * found.cpus

    def add() -> None:
        for engine in state.engines.values():
            if engine.host is None:
                engine.history.add_machine(found.used, others, found.is_busy)

    try:
        await state.read_exporters(add)
    except ApiError:
        return  # an exporter blocks the others; this period has none
