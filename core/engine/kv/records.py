"""Records: one block of a KV group as bytes, and how they get into and out of the cache.

A record has what all caches of its group hold of a block on this rank, one cache after the other, each tensor of it as
a whole: ``[block_size, ...]`` keys, values and scales of tokens, or the tokens of a recurrent op and the state after
them. A record is one piece of memory where the cache has many.

Ranks on one machine may have one memory: there a record has the parts of all ranks, one after the other, and each
copies its own.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.transfer import Arriving, upload
from engine.kv.cache import KVCache

BLOCKS_AT_ONCE = 64
"""Copied together: what lies between two copies stays in the processor's caches."""
ELEMENTS = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)
"""Bytes are copied as the widest of these that fits: as single ones, 16 times as many would be."""


@dataclass(frozen=True, slots=True)
class Part:
    """Of the slots of a group, what one rank copies to them and from them. All in bytes."""

    begin: int
    """Where it begins in a slot."""
    num_bytes: int
    slot_bytes: int
    """Of a whole slot: the parts of all ranks."""


class Records:
    """The records of a cache, in memory of this machine."""

    def __init__(self, kv: KVCache) -> None:
        self._tensors = [kv.block_tensors(group) for group in range(kv.num_groups)]
        self._sizes = [[own[0].nbytes for own in its] for its in self._tensors]
        self.num_bytes = tuple(map(sum, self._sizes))
        """By group: of one record on this rank; 0 where it has none of its caches."""
        self._parts: list[list[Tensor]] = []
        self._memory: list[Tensor] = []
        self._device = next((own.device for its in self._tensors for own in its), torch.device("cpu"))
        self._aside = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        """Of a GPU: what copies to memory, while steps go on."""

    def attach(self, memory: Sequence[memoryview], parts: Sequence[Part] | None = None) -> None:
        """``memory``: by group, the slots that records are kept in; ``parts``: what of them is this rank's, ``None``:
        all. It must not go away before this object. With a GPU it is pinned, so that the host does not wait for
        copies. Raises ``ValueError`` for parts of another size."""
        parts = [Part(0, size, size) for size in self.num_bytes] if parts is None else parts
        if (expected := tuple([part.num_bytes for part in parts])) != self.num_bytes:
            raise ValueError(f"records have {self.num_bytes} bytes on this rank, expected {expected}")
        self._parts, self._memory = [], []
        for slots, part, tensors, sizes in zip(memory, parts, self._tensors, self._sizes, strict=True):
            element = _widest([*sizes, part.begin, part.slot_bytes])
            begin, end = part.begin // element.itemsize, (part.begin + part.num_bytes) // element.itemsize
            self._parts.append([own.flatten(1).view(element) for own in tensors])
            if not part.num_bytes:
                self._memory.append(torch.empty(0))
                continue
            whole = torch.frombuffer(slots, dtype=element).view(-1, part.slot_bytes // element.itemsize)
            if self._aside is not None:
                pin(whole)
            self._memory.append(whole[:, begin:end])

    @torch.inference_mode()
    def gather(self, group: int, blocks: Sequence[int], slots: Sequence[int]) -> Arriving:
        """Copy blocks of the cache to slots, in stream order: what happens to the blocks afterwards does not matter.
        Returns what to wait for before the slots are read."""
        parts, memory = self._parts[group], self._memory[group]
        for some in _pieces(len(blocks)):
            own, into = upload(blocks[some], torch.int64, self._device), slots[some]
            if self._aside is None:
                self._gather_in_place(group, own, torch.tensor(into))
            elif parts:
                rows = torch.cat([part.index_select(0, own) for part in parts], dim=1)
                self._aside.wait_stream(torch.cuda.current_stream())
                rows.record_stream(self._aside)
                with torch.cuda.stream(self._aside):
                    for row, slot in zip(rows, into, strict=True):
                        memory[slot].copy_(row, non_blocking=True)
        return Arriving((), None if self._aside is None else self._aside.record_event())

    @torch.inference_mode()
    def scatter(self, group: int, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy slots to blocks of the cache, in stream order."""
        parts, memory = self._parts[group], self._memory[group]
        for some in _pieces(len(blocks)):
            own, of = upload(blocks[some], torch.int64, self._device), slots[some]
            if self._aside is None:
                self._scatter_in_place(group, torch.tensor(of), own)
            elif parts:
                rows = torch.empty(len(of), memory.shape[1], dtype=memory.dtype, device=self._device)
                for row, slot in zip(rows, of, strict=True):
                    row.copy_(memory[slot], non_blocking=True)
                sizes = [part.shape[1] for part in parts]
                for part, record in zip(parts, torch.split(rows, sizes, dim=1), strict=True):
                    part.index_copy_(0, own, record)

    def loaded(self) -> Arriving:
        """What to wait for before slots that :meth:`scatter` has copied are written to."""
        return Arriving((), None if self._aside is None else torch.cuda.current_stream().record_event())

    def _gather_in_place(self, group: int, blocks: Tensor, slots: Tensor) -> None:
        for part, record in self._records(group):
            record.index_copy_(0, slots, part.index_select(0, blocks))

    def _scatter_in_place(self, group: int, slots: Tensor, blocks: Tensor) -> None:
        for part, record in self._records(group):
            part.index_copy_(0, blocks, record.index_select(0, slots))

    def _records(self, group: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A tensor of the cache, and its place in all records."""
        begin = 0
        for part in self._parts[group]:
            end = begin + part.shape[1]
            yield part, self._memory[group][:, begin:end]
            begin = end


def pin(memory: Tensor) -> None:
    """Lock the pages of a tensor, for a GPU to copy while the host goes on. Raises ``RuntimeError`` where the system
    refuses."""
    if not memory.numel():
        return
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))  # type: ignore[no-untyped-call]
    if code:
        raise RuntimeError(
            f"{memory.nbytes} bytes of records cannot be pinned (CUDA error {code}): keep fewer, as with a smaller "
            "kv_store.STORE.max_bytes"
        )


def _pieces(count: int) -> Iterator[slice]:
    """A few blocks at a time."""
    return (slice(at, at + BLOCKS_AT_ONCE) for at in range(0, count, BLOCKS_AT_ONCE))


def own_records(kv: KVCache, num_slots: Sequence[int]) -> Records:
    """Records of a further rank, in memory of its own: pages are taken when they are written to."""
    records = Records(kv)
    records.attach(
        [memoryview(mmap.mmap(-1, max(1, n * size))) for n, size in zip(num_slots, records.num_bytes, strict=True)]
    )
    return records


def shared_records(
    kv: KVCache, file: int, offsets: Sequence[int], num_slots: Sequence[int], parts: Sequence[Part]
) -> Records:
    """Records of a further rank, in the memory of rank 0. ``file``: a descriptor of it; ``offsets``: by group,
    where in it the first slot begins. Raises as :meth:`Records.attach`."""
    records = Records(kv)
    ends = [begin + count * part.slot_bytes for begin, count, part in zip(offsets, num_slots, parts, strict=True)]
    memory = memoryview(mmap.mmap(file, max(ends)))
    records.attach([memory[begin:end] for begin, end in zip(offsets, ends, strict=True)], parts)
    return records


def _widest(sizes: Sequence[int]) -> torch.dtype:
    """An element that divides all these numbers of bytes."""
    return next(element for element in ELEMENTS if not any(size % element.itemsize for size in sizes))
