"""Cosines and sines by position, kept: what a recorded function can look up."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.execution import row_ops
from engine.execution.lowering.settings import Rotations

PAGE = 256
"""Positions computed at once."""


class RotationTables:
    """What ``rotate`` returns for positions below ``capacity``.

    Positions that nobody has asked for take address space, but no memory.
    """

    def __init__(self, rotate: Rotations, capacity: int) -> None:
        self._rotate = rotate
        self.capacity = capacity
        self._filled = 0
        self._tables: tuple[tuple[Tensor, Tensor], ...] = ()

    def reach(self, length: int) -> None:
        """Make sure of positions up to ``length - 1``. Raises ``ValueError`` beyond the capacity."""
        if length > self.capacity:
            raise ValueError(f"position {length - 1}, expected less than {self.capacity}")
        while self._filled < length:
            page = self._rotate(torch.arange(self._filled, self._filled + PAGE))
            if not self._tables:
                self._tables = tuple((self._room(cos), self._room(sin)) for cos, sin in page)
            for tables, values in zip(self._tables, page, strict=True):
                for table, value in zip(tables, values, strict=True):
                    table[self._filled : self._filled + PAGE] = value
            self._filled += PAGE

    @property
    def num_bytes(self) -> int:
        """What has been written of them."""
        return sum(self._filled * table[0].nbytes for tables in self._tables for table in tables)

    def __call__(self, positions: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """As ``rotate``, by native calls. ``positions``: int64 ``[num_tokens]``, contiguous, within :meth:`reach`."""
        return tuple((self._rows(cos, positions), self._rows(sin, positions)) for cos, sin in self._tables)

    def _room(self, page: Tensor) -> Tensor:
        return page.new_empty(-(-self.capacity // PAGE) * PAGE, *page.shape[1:])

    def _rows(self, table: Tensor, positions: Tensor) -> Tensor:
        out = table.new_empty(positions.shape[0], *table.shape[1:])
        row_ops.gather(table, positions, out)
        return out
