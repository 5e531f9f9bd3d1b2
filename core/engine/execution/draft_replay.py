"""What a drafter does at each step, replayed: the native calls of a function, and those of a chain of drafts, recorded
once for each number of tokens.

Python and torch add some ten microseconds to each op of a drafter, which reads a tenth of the weights that the target
does: in a step of a one-layer head of the bundled model that was three quarters of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch, AttentionKernel, RestagingKernel
from engine.contracts.drafter import ChainFirst, ChainStep, DraftRows, DraftTokens
from engine.execution import row_ops
from engine.execution.lowering import MOST_TOKENS, Memory, Recordings, Table, record
from engine.execution.places import Place
from engine.step.tables import DeviceTables

MOST_DRAFTS = 64
"""Of a chain."""

Plain = Callable[[DraftRows, Tensor | None], DraftTokens]


@dataclass(frozen=True, slots=True)
class Replaying:
    """What recordings need of the engine."""

    tables: DeviceTables
    attention: AttentionKernel
    recordings: Recordings

    def reach(self, longest: int) -> bool:
        """Have the rotations of so many tokens ready; ``False`` if there is no room for them."""
        for tables in self.recordings.rotations:
            if longest > tables.capacity:
                return False
            tables.reach(longest)
        return True

    def restage(self, staged: Any, batch: AttentionBatch) -> None:
        assert isinstance(self.attention, RestagingKernel)
        self.attention.restage(staged, batch)

    def keep(self, place: Place) -> Place:
        """A place like this one in memory of its own, staged."""
        staged, memory = self.attention.stage(place.attention), Memory(self.recordings.arena)
        return Place(place.positions.clone(), place.slot_mapping.clone(), place.attention, staged, memory=memory)


# Functions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RecordedFunction:
    fill: row_ops.Copies
    """Of the arguments, the positions and the slots."""
    staged: Any
    """What attention reads: each call's own batch is staged there. The batch it was recorded with is let go."""
    replay: Callable[[], None]
    result: Tensor
    held: Sequence[Tensor]


class ReplayedFunction:
    """See :meth:`engine.contracts.drafter.DraftEngine.replayed`."""

    def __init__(self, function: Callable[..., Tensor], replaying: Replaying) -> None:
        self._function = function
        self._replaying = replaying
        self._recorded: Table[int, _RecordedFunction] = replaying.recordings.table(_name(function))
        """By number of tokens."""

    def __call__(self, *arguments: Tensor, place: Place) -> Tensor:
        count = place.positions.shape[0]
        recorded = None
        # What calls this may be on its way into a recording itself.
        if place.memory is None and _fits(count) and self._replaying.reach(max(place.attention.kv_lens)):
            recorded = self._recorded.find(count, partial(self._record, arguments, place))
        if recorded is None:
            return self._function(*arguments, place=place)
        recorded.fill((*arguments, place.positions, place.slot_mapping))
        self._replaying.restage(recorded.staged, place.attention)
        recorded.replay()
        return recorded.result

    def _record(self, arguments: Sequence[Tensor], place: Place) -> _RecordedFunction:
        kept = self._replaying.keep(place)
        own = [argument.clone(memory_format=torch.contiguous_format) for argument in arguments]
        inputs, memory = (*own, kept.positions, kept.slot_mapping), kept.memory
        assert memory is not None

        def call() -> Sequence[Tensor]:
            return (memory.kept(self._function(*own, place=kept)),)

        (result,), replay = record(call, inputs, memory)
        return _RecordedFunction(row_ops.Copies(inputs), kept.staged, replay, result, (*inputs, result))


# Chains ----------------------------------------------------------------------------------------------------------


class _RecordedChain:
    """Chains of a number of requests. What they are told from step to step, and the drafts, are in memory of their own.
    """

    def __init__(self, rows: DraftRows, state: Tensor | None, replaying: Replaying) -> None:
        """``state``: what the first step is handed of each request."""
        tables = replaying.tables
        count, blocks = len(rows.index), tables.block_tables
        self.slots, self.lengths, self.tokens = rows.slots.clone(), rows.positions.clone(), rows.tokens.clone()
        self.state = None if state is None else state.clone()
        self.drafts = rows.tokens.new_empty(count, MOST_DRAFTS)
        kv_lens = torch.tensor([length + 1 for length in rows.lengths], dtype=torch.int32)
        batch = AttentionBatch(
            q_lens=(1,) * count,
            kv_lens=tuple(length + 1 for length in rows.lengths),
            block_tables=blocks.new_zeros(count, blocks.shape[1]),
            q_starts=torch.arange(count + 1, dtype=torch.int32),
            kv_lens_device=kv_lens,
            block_size=tables.block_size,
        )
        positions, mapping = torch.empty_like(self.lengths), torch.empty_like(self.lengths)
        memory = Memory(replaying.recordings.arena)
        self.place = Place(positions, mapping, batch, replaying.attention.stage(batch), memory=memory)
        self.fill = row_ops.Copies((self.slots, self.lengths, self.tokens))
        self.chains = row_ops.Chains(
            blocks.data_ptr(), blocks.stride(0), tables.block_size, count, self.slots.data_ptr(),
            self.lengths.data_ptr(), positions.data_ptr(), mapping.data_ptr(), batch.block_tables.data_ptr(),
            kv_lens.data_ptr(), self.drafts.data_ptr(), MOST_DRAFTS, 0,
        )  # fmt: skip
        self.first: Callable[[], None] | None = None
        self.step: Callable[[], None] | None = None

    @property
    def held(self) -> Sequence[Tensor]:
        place, batch = self.place, self.place.attention
        own = (self.slots, self.drafts, place.positions, place.slot_mapping, batch.block_tables, batch.kv_lens_device)
        return (*self.changed, *own)

    @property
    def changed(self) -> list[Tensor]:
        """What a step changes."""
        return [self.lengths, self.tokens, *([] if self.state is None else [self.state])]

    def begin(self, rows: DraftRows, hidden: Tensor | None) -> None:
        self.fill((rows.slots, rows.positions, rows.tokens))
        if self.state is not None:
            assert hidden is not None
            row_ops.gather(hidden.contiguous(), rows.last, self.state)
        self.chains.made = 0

    def grow(self, tokens: Tensor, state: Tensor | None, advance: bool) -> None:
        """Native calls that end a step."""
        row_ops.grow(self.chains, tokens, advance)
        targets = [(tokens, self.tokens), *([] if state is None or self.state is None else [(state, self.state)])]
        for source, target in targets:
            if source.data_ptr() != target.data_ptr():
                row_ops.copy(source, target)


class ReplayedChain:
    """See :meth:`engine.contracts.drafter.DraftEngine.chain`."""

    def __init__(self, step: ChainStep, first: ChainFirst | None, plain: Plain, replaying: Replaying) -> None:
        """``plain``: does the same, unrecorded."""
        self._step, self._first = step, first
        self._plain = plain
        self._replaying = replaying
        self._recorded: Table[int, _RecordedChain] = replaying.recordings.table(_name(step))
        """By number of requests."""

    def __call__(self, rows: DraftRows, hidden: Tensor | None = None) -> DraftTokens:
        count, width = len(rows.index), rows.width
        chain = None
        if _fits(count) and width <= MOST_DRAFTS and self._replaying.reach(max(rows.lengths) + width):
            chain = self._recorded.find(count, partial(self._record, rows, hidden))
        if chain is None:
            return self._plain(rows, hidden)
        assert chain.step is not None
        chain.begin(rows, hidden)
        if chain.first is not None:
            chain.first()
        for _ in range(width - chain.chains.made):
            chain.step()
        return DraftTokens(chain.drafts[:, :width])

    def _record(self, rows: DraftRows, hidden: Tensor | None) -> _RecordedChain:
        chain = _RecordedChain(rows, None if hidden is None else hidden[rows.last], self._replaying)
        memory, first = chain.place.memory, self._first
        assert memory is not None

        def begin() -> Sequence[Tensor]:
            assert first is not None and chain.state is not None
            tokens = first(chain.state)
            chain.grow(tokens, None, advance=False)
            return [chain.tokens]

        def step() -> Sequence[Tensor]:
            row_ops.place(chain.chains)
            tokens, state = self._step(chain.tokens, chain.state, chain.place)
            chain.grow(tokens, state, advance=True)
            return chain.changed

        if first is not None:
            _, chain.first = record(begin, chain.changed, memory)
        _, chain.step = record(step, chain.changed, memory)
        return chain


def _fits(count: int) -> bool:
    """Whether so many tokens are replayed."""
    return 0 < count <= MOST_TOKENS


def _name(function: Callable[..., object]) -> str:
    return str(getattr(function, "__qualname__", function))
