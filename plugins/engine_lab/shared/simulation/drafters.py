"""Stand-ins for drafters: they propose as many tokens as they are asked for, one on the host not always; the device
decides what is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from engine.contracts.drafter import Draft, Drafter, DrafterKV, DraftRow
from engine_lab.shared.simulation.spec import Drafts

_MASK = (1 << 64) - 1


def chance(seed: int, request: int, token: int) -> float:
    """From 0 to 1, the same for a request's token whatever else is in the step (SplitMix64)."""
    z = ((seed << 32) + request) * 0x9E3779B97F4A7C15 + token * 0xBF58476D1CE4E5B9 & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z >> 11) / (1 << 53)


class _NoDrafts:
    placement: Literal["host", "device"] = "device"
    max_width = 0

    def release(self, row_id: int) -> None: ...


class _HostDrafts:
    """Its time counts as the device's: the loop waits for it."""

    placement: Literal["host", "device"] = "host"

    def __init__(self, max_width: int, proposes: float) -> None:
        self.max_width = max_width
        self._proposes = proposes

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return Draft(tuple((0,) * (row.num_draft_tokens if self._has_some(row) else 0) for row in rows))

    def _has_some(self, row: DraftRow) -> bool:
        return chance(0, row.tokens[-1], len(row.tokens)) < self._proposes

    def release(self, row_id: int) -> None: ...


class _DeviceDrafts:
    placement: Literal["host", "device"] = "device"
    aux_layers: tuple[int, ...] = ()
    kv: DrafterKV | None = None
    kv_lookahead = 0
    weights_bytes = 0

    def __init__(self, max_width: int) -> None:
        self.max_width = max_width

    def start(self, engine: Any) -> None: ...

    def extend(self, step: Any) -> None: ...

    def propose(self, rows: Any) -> Any: ...

    def release(self, row_id: int) -> None: ...


def stand_in(drafts: Drafts | None, max_width: int) -> Drafter:
    if drafts is None or not max_width:
        return _NoDrafts()
    return _HostDrafts(max_width, drafts.cost.proposes) if drafts.placement == "host" else _DeviceDrafts(max_width)
