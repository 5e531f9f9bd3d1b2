"""What this machine allows at best: read every weight once for a token, multiply each with every new prompt token."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec

from engine_lab.ladder.record import Ladder, Run, Survey

ROWS = "512"
"""Rows of the product whose rate bounds a prompt."""


async def machine() -> dict[str, Any]:
    """What ``engine bench-machine`` measures, in a process of its own. Raises ``RuntimeError``."""
    words = (sys.executable, "-P", "-m", "engine.cli.main", "bench-machine", "--json", "-")
    process = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, complaint = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"engine bench-machine: {complaint.decode(errors='replace').strip()} (--no-floor)")
    return dict(msgspec.json.decode(out))


def floors(ladder: Ladder, survey: Survey, runs: Sequence[Run]) -> dict[str, float]:
    """Milliseconds by key of a figure; without what is not known. For one request at a time and no drafts."""
    found: dict[str, float] = {}
    machine, engine = ladder.floor, ladder.engine
    if machine is None or engine is None:
        return found
    if weights := survey.facts.get("weights_bytes"):
        found["itl"] = weights / machine["read_gb_s"] / 1e6
    rates = [w["gflops"][ROWS] for w in machine["ways"] if w["is_chosen"] and w["weights"] == engine.dtype]
    new = [run.new_tokens for run in runs if run.new_tokens is not None]
    if rates and engine.parameters and new:
        found["ttft_p50"] = 2 * engine.parameters * median(new) / max(rates) / 1e6
    return found
