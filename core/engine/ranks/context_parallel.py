"""Prefill context parallelism: ranks that hold the same weights share out the tokens of a step.

Each rank computes the layers for its own tokens. After every op that writes keys and values the ranks exchange what
was written, as it is stored, so that each has the whole cache. A step of few tokens is computed by every rank alone.

Decode context parallelism (``dcp``), where each rank caches other tokens, is in ``models/placement.py`` and
``kernels/torch/shared_attention.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.contracts.communicator import Communicator
from engine.kernels.context import Cache, ForwardBatch
from engine.kernels.transfer import upload
from engine.step.plan import StepRow
from engine.step.tables import DeviceTables

GROUP = "pcp"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of a row's tokens in a step."""

    row: int
    """Its place in the plan."""
    first: int
    size: int


def pieces_of(counts: Sequence[int], ranks: int) -> list[list[Piece]]:
    """By rank, what it computes of rows of so many tokens. Of ``2 * ranks`` pieces of a row the i-th rank has the i-th
    and the i-th from the end: later tokens attend to more. The first rank is another one for every row."""
    found: list[list[Piece]] = [[] for _ in range(ranks)]
    for row, count in enumerate(counts):
        ends = [count * i // (2 * ranks) for i in range(2 * ranks + 1)]
        for i in range(ranks):
            spans = [(ends[k], ends[k + 1]) for k in (i, 2 * ranks - 1 - i)]
            if spans[0][1] == spans[1][0]:
                spans = [(spans[0][0], spans[1][1])]
            found[(i + row) % ranks] += [Piece(row, first, end - first) for first, end in spans if end > first]
    return found


class DealtStep:
    """One rank's part of a step whose tokens are shared out: fulfils :class:`engine.kernels.context.DealtTokens`."""

    def __init__(
        self, rows: Sequence[StepRow], pieces: Sequence[Sequence[Piece]], index: int,
        tables: DeviceTables, communicator: Communicator,
    ) -> None:  # fmt: skip
        """``pieces``: of all ranks; ``index``: which of them are this rank's."""
        self._communicator = communicator
        self._index = index
        self._counts = [sum(piece.size for piece in of_rank) for of_rank in pieces]
        begins = list(accumulate((row.num_queries for row in rows), initial=0))
        every, own = [piece for of_rank in pieces for piece in of_rank], pieces[index]
        q_lens = tuple(piece.size for piece in own)
        parts = (
            [rows[piece.row].row_id for piece in every for _ in range(piece.size)],
            [piece.first + i for piece in every for i in range(piece.size)],
            [begins[piece.row] + piece.first + i for piece in every for i in range(piece.size)],
            [rows[piece.row].row_id for piece in own],
            [piece.first for piece in own],
            list(accumulate(q_lens, initial=0)),
        )
        uploaded = upload([number for part in parts for number in part], torch.int64, tables.device)
        row_ids, steps, self._order, own_rows, firsts, q_starts = torch.split(uploaded, [len(part) for part in parts])
        positions = tables.computed[row_ids] + steps
        slots = tables.slot_mappings(row_ids, positions)
        self._slots = [torch.split(mapping, self._counts) for mapping in slots]
        first = sum(self._counts[:index])
        mine = slice(first, first + self._counts[index])
        max_ends = [rows[piece.row].max_start + piece.first + piece.size for piece in own]
        starts, row_ids, positions = tables.computed[own_rows] + firsts, row_ids[mine], positions[mine]
        self.batch = ForwardBatch(
            token_ids=tables.tokens[row_ids, positions],
            positions=positions,
            slot_mappings=tuple(mapping[mine] for mapping in slots),
            attention=tables.attention(own_rows, starts, q_lens, max_ends, q_starts, positions),
            row_ids=row_ids,
            dealt=self,
        )
        """Of this rank's tokens."""

    def written(self, kv: Cache, cache: int) -> None:
        slots = self._slots[kv.group_of[cache]]
        for rank, stored in enumerate(self._parts(kv.stored(cache, slots[self._index]))):
            if rank != self._index:
                kv.store(cache, slots[rank], stored)

    def whole(self, x: Tensor) -> Tensor:
        """``x [own tokens, ...]`` of all ranks: that of all tokens, in the order of the plan."""
        found = x.new_empty(sum(self._counts), *x.shape[1:])
        return found.index_copy_(0, self._order, self.gathered(x))

    def gathered(self, x: Tensor) -> Tensor:
        return torch.cat(self._parts(x))

    def summed(self, x: Tensor) -> Tensor:
        return self._communicator.reduce_scatter(x.contiguous(), GROUP, self._counts)

    def _parts(self, x: Tensor) -> list[Tensor]:
        parts = [x.new_empty(count, *x.shape[1:]) for count in self._counts]
        self._communicator.all_gather(x.contiguous(), GROUP, parts)
        return parts


class Dealing:
    """Which steps a rank computes a part of, and which part."""

    def __init__(
        self, ranks: int, index: int, fewest_tokens: int, tables: DeviceTables, communicator: Communicator
    ) -> None:
        """``index``: of this rank, among ``ranks``; ``fewest_tokens``: of a step that is shared out."""
        self._ranks = ranks
        self._index = index
        self._fewest_tokens = fewest_tokens
        self._tables = tables
        self._communicator = communicator

    def step(self, rows: Sequence[StepRow]) -> DealtStep | None:
        """``None`` for a step that every rank computes alone. It follows from the plan, so all ranks decide alike."""
        counts = [row.num_queries for row in rows]
        if sum(counts) < self._fewest_tokens:
            return None
        pieces = pieces_of(counts, self._ranks)
        if not all(pieces):
            return None
        return DealtStep(rows, pieces, self._index, self._tables, self._communicator)
