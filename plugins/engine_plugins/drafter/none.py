"""No speculation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.contracts.config import DrafterConfig
from engine.contracts.drafter import Draft, DraftRow
from engine.contracts.provider import BuildContext


@dataclass(frozen=True)
class NoDrafterConfig(DrafterConfig):
    """No speculation: the device tables need no space for drafts."""

    max_width: int = 0


class NoDrafter:
    """Proposes nothing. ``max_width == 0`` makes the core not even ask."""

    placement: Literal["host", "device"] = "device"
    max_width = 0

    def __init__(self, config: DrafterConfig, context: BuildContext) -> None:
        pass

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return Draft(tokens=((),) * len(rows))

    def release(self, row_id: int) -> None:
        pass
