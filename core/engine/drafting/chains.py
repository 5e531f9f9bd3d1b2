"""Chains of drafts of few requests as programs.

Python and torch add some ten microseconds to each op of a drafter, which reads a tenth of the weights that the target
does: in a step of a one-layer head of the bundled model that was three quarters of the time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from engine.contracts.drafter import ChainFirst, ChainStep, DraftRows, DraftTokens
from engine.kernels.cpu.captured import Programs, memory_of, move
from engine.kernels.cpu.program import Program
from engine.kernels.cpu.row_ops import Chains, copy, gathered, kernels, widen
from engine.sampling.choose_native import Columns, chosen
from engine.step.tables import DeviceTables

MOST_DRAFTS = 64
"""Of a chain."""

Plain = Callable[[DraftRows, "Tensor | None"], DraftTokens]


class CapturedChain:
    """See :meth:`engine.contracts.drafter.DraftEngine.chain`. The state of all chains is in memory of its own, which
    the program of a step changes: the number of rows picks the program, the number of drafts how often it runs."""

    def __init__(
        self,
        step: ChainStep,
        first: ChainFirst | None,
        ids: Tensor | None,
        plain: Plain,
        programs: Programs,
        tables: DeviceTables,
    ) -> None:
        """``plain``: does the same, uncaptured."""
        self._step, self._first, self._ids = step, first, ids
        self._sampling = Columns(*tables.sampling.addresses())
        self._plain = plain
        self._programs = programs
        self._hidden: Tensor | None = None
        """The hidden state of each chain, where there is any."""
        numbers = torch.empty(0, dtype=torch.int64)
        self._table_rows, self._lengths, self._tokens = (programs.set_aside(numbers) for _ in range(3))
        self._drafts = programs.set_aside(numbers.new_empty(0, MOST_DRAFTS))
        own = (tensor.data_ptr() for tensor in (self._table_rows, self._lengths, self._tokens, self._drafts))
        blocks = tables.block_tables
        self._chains = Chains(
            blocks.data_ptr(), *blocks.stride()[:2], tables.block_size, programs.metadata, *own, MOST_DRAFTS
        )
        self._written: list[tuple[Program | None, Program]] | None = None
        """What comes first, and a step, by number of requests."""

    def __call__(self, rows: DraftRows, hidden: Tensor | None = None) -> DraftTokens:
        count, most = len(rows.index), rows.most_draft_tokens
        if not count:
            return self._plain(rows, hidden)
        if self._written is None:
            self._hidden = None if hidden is None else self._programs.set_aside(hidden)
            self._written = self._programs.write_all(name_of(self._step), self._write, Exception)
        longest = max(rows.lengths, default=0) + most
        if count > len(self._written) or most > MOST_DRAFTS or longest > self._programs.max_len:
            return self._plain(rows, hidden)
        first, step = self._written[count - 1]
        self._begin(rows, hidden)
        if first is not None:
            first.run(longest)
        for _ in range(most - self._chains.made):
            step.run(longest)
        return DraftTokens(self._drafts[:count, :most].clone())

    def _constants(self) -> list[Tensor]:
        return [] if self._ids is None else [self._ids]

    def _begin(self, rows: DraftRows, hidden: Tensor | None) -> None:
        move(rows.row_ids, self._table_rows)
        move(rows.positions, self._lengths)
        move(rows.tokens, self._tokens)
        if self._hidden is not None:
            assert hidden is not None
            gathered(hidden.contiguous(), rows.last.contiguous(), self._hidden)()
        self._chains.rows, self._chains.made = len(rows.index), 0

    def _write(self, count: int) -> tuple[Program | None, Program]:
        return None if self._first is None else self._write_first(self._first, count), self._write_step(count)

    def _write_first(self, first: ChainFirst, count: int) -> Program:
        program, _ = self._programs.begin(name_of(first), count)
        assert self._hidden is not None
        self._grow(program, first(program.value("hidden", self._hidden[:count])), count, advance=0)
        return program

    def _write_step(self, count: int) -> Program:
        program, metadata = self._programs.begin(name_of(self._step), count)
        program.add(kernels().place_chains.at(ctypes.addressof(self._chains)))
        hidden = None if self._hidden is None else program.value("hidden", self._hidden[:count])
        logits, following = self._step(program.value("chain_tokens", self._tokens[:count]), hidden, metadata)
        self._grow(program, logits, count, advance=1)
        if hidden is not None and following is not None:
            copy(following, hidden)
        return program

    def _grow(self, program: Program, logits: Tensor, count: int, advance: int) -> None:
        """The drafts that a step ends with."""
        # A step that has a first one before it drafts a token further after what it computes.
        offset = int(advance > 0 and self._first is not None)
        scores, tokens = widen(logits), program.buffer("drafted", (count,), torch.int64)
        (memory,), (drafts,) = memory_of((scores,)), memory_of((tokens,))
        rows, lengths = self._table_rows[:count], self._lengths[:count]
        program.add(chosen(self._sampling, rows, lengths, offset, memory, self._ids, drafts), self._constants())
        program.add(kernels().grow_chains.at(ctypes.addressof(self._chains), drafts.data_ptr(), advance))


def name_of(function: Callable[..., object]) -> str:
    """The name of a drafter's function in messages."""
    return str(getattr(function, "__qualname__", function))
