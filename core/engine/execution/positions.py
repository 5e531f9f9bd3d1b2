"""One output position whose logits are at hand: the unit that adjusting, sampling and verifying work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.contracts.request import SamplingParams
from engine.execution.philox import signed64
from engine.execution.transfer import upload


@dataclass(frozen=True, slots=True)
class TableRow:
    """A request's row of the token table."""

    table: Tensor
    """int64 ``[slots, width]``"""
    slot: int


@dataclass(frozen=True, slots=True)
class Position:
    params: SamplingParams
    seed: int
    """64-bit."""
    index: int
    """Output position, 0-based: the first token after the prompt is 0."""
    prompt_len: int
    history: Tensor
    """int64 ``[known]`` on the device: prompt and output so far, without ``drafts``. Read only for penalties."""
    stop_ids: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()
    """Drafted tokens between ``history`` and this position."""
    row: TableRow | None = None
    """Where ``history``, and behind it ``drafts``, stand on the device."""

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0.0


def streams(positions: Sequence[Position], device: torch.device) -> tuple[Tensor, Tensor]:
    """(seeds, output positions), int64 ``[N]`` each: what names a position's random numbers."""
    seeds = upload([signed64(p.seed) for p in positions], torch.int64, device)
    return seeds, upload([p.index for p in positions], torch.int64, device)
