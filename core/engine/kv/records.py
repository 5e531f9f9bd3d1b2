"""Records: one block of a KV group as bytes, and how they get into and out of the cache.

A record has what all caches of its group hold of a block on this rank, one cache after the other, each tensor of it as
a whole: ``[block_size, ...]`` keys, values and scales of tokens, or the tokens of a recurrent op and the state after
them. A record is one piece of memory where the cache has many.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.kv.cache import KVCache

BLOCKS_AT_ONCE = 64
"""Copied together: what lies between two copies stays in the processor's caches."""
ELEMENTS = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)
"""Bytes are copied as the widest of these that fits: as single ones, 16 times as many would be."""


class Records:
    """The records of a cache, in memory of this machine."""

    def __init__(self, kv: KVCache) -> None:
        tensors = [kv.block_tensors(group) for group in range(kv.num_groups)]
        sizes = [[own[0].nbytes for own in its] for its in tensors]
        self.num_bytes = tuple(map(sum, sizes))
        """By group: of one record; 0 where this rank has none of its caches."""
        self._elements = [_widest(its) for its in sizes]
        self._parts = [
            [own.flatten(1).view(element) for own in its] for its, element in zip(tensors, self._elements, strict=True)
        ]
        self._memory: list[Tensor] = []

    def attach(self, memory: Sequence[memoryview]) -> None:
        """``memory``: by group, the slots that records are kept in. It must not go away before this object."""
        every = zip(memory, self.num_bytes, self._elements, strict=True)
        self._memory = [
            torch.frombuffer(m, dtype=element).view(-1, size // element.itemsize) if size else torch.empty(0)
            for m, size, element in every
        ]

    @torch.inference_mode()
    def gather(self, group: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks of the cache to slots."""
        for own, into, part, record in self._pieces(group, blocks, slots):
            record.index_copy_(0, into, part.index_select(0, own.to(part.device)).cpu())

    @torch.inference_mode()
    def scatter(self, group: int, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy slots to blocks of the cache."""
        for own, of, part, record in self._pieces(group, blocks, slots):
            part.index_copy_(0, own.to(part.device), record.index_select(0, of).to(part.device))

    def _pieces(
        self, group: int, blocks: Sequence[int], slots: Sequence[int]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Blocks, slots, a tensor of the cache, and its place in all records: a few blocks at a time."""
        for at in range(0, len(blocks), BLOCKS_AT_ONCE):
            some = slice(at, at + BLOCKS_AT_ONCE)
            own, of, begin = torch.tensor(blocks[some]), torch.tensor(slots[some]), 0
            for part in self._parts[group]:
                end = begin + part.shape[1]
                yield own, of, part, self._memory[group][:, begin:end]
                begin = end


def own_records(kv: KVCache, num_slots: Sequence[int]) -> Records:
    """Records of a further rank, in memory of its own: pages are taken when they are written to."""
    records = Records(kv)
    records.attach(
        [memoryview(mmap.mmap(-1, max(1, n * size))) for n, size in zip(num_slots, records.num_bytes, strict=True)]
    )
    return records


def _widest(sizes: Sequence[int]) -> torch.dtype:
    """An element that divides all these numbers of bytes."""
    return next(element for element in ELEMENTS if not any(size % element.itemsize for size in sizes))
