"""Records of memory, lent to a store that gives them to other engines."""

from __future__ import annotations

from collections.abc import Sequence

from engine.contracts.kv_store import Loan
from engine.kv.checked_memory import CheckedMemory

MOST_LENT = 0.25
"""Of memory: what is lent at once, at most."""


class Lending:
    """See :class:`engine.contracts.kv_store.Lender`."""

    def __init__(self, memory: CheckedMemory, num_bytes: Sequence[int]) -> None:
        """``num_bytes``: of a record, by group."""
        self._memory = memory
        self._num_bytes = tuple(num_bytes)
        self._most_bytes = MOST_LENT * memory.store.usage().most_bytes
        self._lent: set[int] = set()
        self._loans = self._bytes_lent = 0

    def has(self, group: int, key: bytes) -> bool:
        return self._memory.find(group, key) is not None

    def lend(self, group: int, key: bytes) -> Loan | None:
        size = self._num_bytes[group]
        if self._bytes_lent + size > self._most_bytes or not self.has(group, key):
            return None
        slot = self._memory.found(group, key)
        self._memory.hold(group, [slot])
        self._bytes_lent += size
        self._loans += 1
        number = self._loans
        self._lent.add(number)

        def give_back() -> None:
            if number in self._lent:  # twice would end a hold of somebody else
                self._lent.remove(number)
                self._bytes_lent -= size
                self._memory.let_go(group, [slot])

        return Loan(self._memory.memory(group)[slot * size : (slot + 1) * size].toreadonly(), give_back)
