"""Cosines and sines of positions: computed once, then looked up in tables."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.context import Rotate
from engine.kernels.cpu.program import Value
from engine.kernels.cpu.row_ops import lookup

PAGE = 256
"""Positions computed at once."""


class RotationTables:
    """What ``rotate`` returns.

    Positions that no token has reached take address space, but no memory.
    """

    def __init__(self, rotate: Rotate) -> None:
        self._rotate = rotate
        self._capacity = 0
        self._filled = 0
        self._tables: tuple[tuple[Tensor, Tensor], ...] = ()

    def __call__(self, positions: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """``positions``: int64 ``[num_tokens]``."""
        if isinstance(positions, Value):
            self._set_aside(positions.program.max_len)
            if self not in positions.program.rotations:
                positions.program.rotations.append(self)
        elif self._tables:
            self.reach(int(positions.max()) + 1)
        else:  # no program has any
            return self._rotate(positions)
        return tuple((lookup(cos, positions, "cos"), lookup(sin, positions, "sin")) for cos, sin in self._tables)

    def reach(self, length: int) -> None:
        """Have positions up to ``length - 1`` in the tables. Raises ``ValueError`` beyond what was set aside."""
        if length > self._capacity:
            raise ValueError(f"position {length - 1}, expected less than {self._capacity}")
        while self._filled < length:
            page = self._rotate(torch.arange(self._filled, self._filled + PAGE))
            for tables, values in zip(self._tables, page, strict=True):
                for table, value in zip(tables, values, strict=True):
                    table[self._filled : self._filled + PAGE] = value
            self._filled += PAGE

    @property
    def num_bytes(self) -> int:
        """What has been written of them."""
        return sum(self._filled * table[0].nbytes for tables in self._tables for table in tables)

    def _set_aside(self, capacity: int) -> None:
        if self._tables:
            assert capacity <= self._capacity, "programs point at these tables: they cannot grow"
            return
        self._capacity, size = capacity, -(-capacity // PAGE) * PAGE
        for cos, sin in self._rotate(torch.zeros(1, dtype=torch.int64)):
            self._tables += ((cos.new_empty(size, *cos.shape[1:]), sin.new_empty(size, *sin.shape[1:])),)
