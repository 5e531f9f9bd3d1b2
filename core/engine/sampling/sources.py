"""What choosing tokens is compiled of. Imports no torch: it is compiled while that is imported."""

from __future__ import annotations

from pathlib import Path

from engine.contracts.config import SlotConfig
from engine.contracts.provider import BuildContext
from engine.native import Source

CHOOSE = Source(Path(__file__).with_name("choose.cpp"))
"""Of drafts."""
MASK = Source(Path(__file__).with_name("mask.cpp"))
"""Of outputs that follow a grammar."""


def drafting_sources(config: SlotConfig, context: BuildContext) -> tuple[Source, ...]:
    """Of a plan whose drafter runs layers on the device."""
    return (CHOOSE,) if context.device.kind == "cpu" and context.execution == "compile" else ()
