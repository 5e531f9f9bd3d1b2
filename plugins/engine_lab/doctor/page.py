"""What the doctor finds, for the page at ``/ui/``."""

from __future__ import annotations

import asyncio

import msgspec

from engine.contracts.findings import EngineReader, Findings
from engine_lab.doctor.diagnosis import diagnose
from engine_lab.doctor.recording import record
from engine_lab.doctor.report import document
from engine_lab.doctor.rules import RULES

WINDOW_S, LONGEST_S = 5.0, 30.0


async def findings(engine: EngineReader) -> Findings:
    """Takes three windows."""
    evidence = await record(engine, WINDOW_S, longest_s=LONGEST_S)
    diagnosis = await asyncio.to_thread(diagnose, evidence, RULES)
    return msgspec.convert(document(diagnosis, evidence), Findings)
