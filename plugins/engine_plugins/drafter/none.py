"""No speculation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from engine.contracts.config import DrafterConfig
from engine.contracts.drafter import Draft, DrafterKV, DraftRow
from engine.contracts.provider import BuildContext

if TYPE_CHECKING:
    from torch import Tensor


class NoDrafter:
    """Proposes nothing. ``max_width == 0`` tells the core not even to ask."""

    placement: Literal["host", "device"] = "device"
    taps: tuple[int, ...] = ()
    kv: DrafterKV | None = None
    kv_lookahead = 0
    max_width = 0
    returns_probs = False

    def __init__(self, config: DrafterConfig, context: BuildContext) -> None:
        pass

    def extend(self, slots: Sequence[int], tokens: Tensor, next_tokens: Tensor, taps: Sequence[Tensor]) -> None:
        pass

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return Draft(tokens=((),) * len(rows))

    def release(self, slot: int) -> None:
        pass
