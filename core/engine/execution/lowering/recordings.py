"""All recordings of an engine: the memory they share, what they take, and what could not be recorded and why."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from engine.execution.lowering.rotation_tables import RotationTables

ARENA_BYTES = 256 * 2**20
"""Of address space: pages nobody has written to take no memory. Many times what 16 tokens of a model need."""
ALIGNMENT = 64
"""Bytes; a cache line."""
POISON = 0xFF
"""Of bytes: as floats they are NaN."""
_PLAIN = "is not always replayed, and each call that is not costs what Python and torch add"


class NotRecorded(Exception):
    """Why a function cannot be recorded, in words."""


class Arena:
    """Memory for what recorded functions allocate.

    One of them runs at a time, and nothing in here outlives a call: each begins at the start of it, so all together
    take what the largest takes.
    """

    def __init__(self) -> None:
        self._all: Tensor | None = None
        self.used = 0
        """The most bytes that anyone has taken."""

    def take(self, start: int, like: Tensor) -> tuple[Tensor, int]:
        """Memory from byte ``start`` on for a contiguous tensor, and where the next may begin.

        Raises :class:`NotRecorded` where :data:`ARENA_BYTES` do not suffice.
        """
        end = start + like.nbytes
        if end > ARENA_BYTES:
            raise NotRecorded(f"it takes {end} bytes, at most {ARENA_BYTES} are kept for recordings")
        if self._all is None:
            room = mmap.mmap(-1, ARENA_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._all = torch.frombuffer(room, dtype=torch.uint8)
        self.used = max(self.used, end)
        return self._all[start:end].view(like.dtype).view(like.shape), -(-end // ALIGNMENT) * ALIGNMENT

    def poison(self, end: int | None = None) -> None:
        """Overwrite everything before byte ``end``; ``None``: all that anyone has used."""
        if self._all is not None:
            self._all[: self.used if end is None else end].fill_(POISON)


class Held(Protocol):
    """A recording."""

    @property
    def held(self) -> Sequence[Tensor]:
        """Its tensors beside those in the arena: what it reads, and what it leaves to its caller."""
        ...


K = TypeVar("K", bound=Hashable)
R = TypeVar("R", bound=Held)


class Table(Generic[K, R]):
    """The recordings of one function, each made when it is first needed."""

    def __init__(self, refused: Callable[[NotRecorded], None]) -> None:
        self._refused = refused
        self._found: dict[K, R | None] = {}
        """By what sets the calls apart; ``None``: cannot be recorded."""

    def find(self, key: K, make: Callable[[], R]) -> R | None:
        """What was recorded for ``key``, or is now; ``None`` where ``make`` raises :class:`NotRecorded`."""
        if key not in self._found:
            try:
                self._found[key] = make()
            except NotRecorded as why:
                self._found[key] = None
                self._refused(why)
        return self._found[key]

    def may(self, key: K) -> bool:
        """Whether ``key`` is recorded, or was never tried."""
        return self._found.get(key, True) is not None

    def has(self, key: K) -> bool:
        """Whether ``key`` is recorded."""
        return self._found.get(key) is not None

    def clear(self) -> None:
        self._found.clear()

    @property
    def made(self) -> list[R]:
        return [found for found in self._found.values() if found is not None]


class Recordings:
    """What one engine has recorded."""

    def __init__(self) -> None:
        self.arena = Arena()
        self.rotations: list[RotationTables] = []
        """Of all layers that drafters run."""
        self._tables: list[Table[Any, Any]] = []
        self._plain: dict[str, str] = {}
        self._noted = False

    def table(self, name: str) -> Table[K, R]:
        """Room for the recordings of one function. ``name``: what the user is told where it cannot be recorded."""
        table: Table[K, R] = Table(partial(self._refuse, name))
        self._tables.append(table)
        return table

    @property
    def num_bytes(self) -> int:
        """What all recordings take now."""
        recorded: list[Held] = [made for table in self._tables for made in table.made]
        held = sum(tensor.nbytes for one in recorded for tensor in one.held)
        return self.arena.used + held + sum(tables.num_bytes for tables in self.rotations)

    def notes(self) -> tuple[str, ...]:
        """What is called plainly and why, a line each. Whatever is found after this is a warning."""
        self._noted = True
        return tuple(f"{name} {_PLAIN}: {reason}" for name, reason in self._plain.items())

    def _refuse(self, name: str, why: NotRecorded) -> None:
        if name in self._plain:
            return
        self._plain[name] = str(why)
        if self._noted:
            warnings.warn(f"{name} {_PLAIN}: {why}", stacklevel=2)
