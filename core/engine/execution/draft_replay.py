"""What a drafter does at each step, replayed: the native calls of a function, and those of a chain of drafts, recorded
once for each number of tokens.

Python and torch add some ten microseconds to each op of a drafter, which reads a tenth of the weights that the target
does: in a step of the bundled model's EAGLE3 head that was three quarters of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch, AttentionKernel, RestagingKernel
from engine.contracts.drafter import ChainFirst, ChainStep, DraftRows, DraftTokens
from engine.execution import row_ops
from engine.execution.lowering import MOST_TOKENS, Memory, RotationTables, record
from engine.execution.places import Place
from engine.execution.tables import DeviceTables

MOST_DRAFTS = 64
"""Of a chain."""

Plain = Callable[[DraftRows, Tensor | None], DraftTokens]


@dataclass(frozen=True, slots=True)
class Replaying:
    """What recordings need of the engine."""

    tables: DeviceTables
    attention: AttentionKernel
    rotations: Sequence[RotationTables]
    """Of all layers that drafters run."""

    def reach(self, longest: int) -> bool:
        """Have the rotations of so many tokens ready; ``False`` if there is no room for them."""
        for tables in self.rotations:
            if longest > tables.capacity:
                return False
            tables.reach(longest)
        return True

    def restage(self, place: Place, batch: AttentionBatch) -> None:
        assert isinstance(self.attention, RestagingKernel)
        self.attention.restage(place.staged, batch)

    def keep(self, place: Place) -> Place:
        """A place like this one in memory of its own, staged."""
        kept = Place(place.positions.clone(), place.slot_mapping.clone(), place.attention, memory=Memory())
        kept.staged = self.attention.stage(place.attention)
        return kept


# Functions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RecordedFunction:
    fill: row_ops.Copies
    """Of the arguments, the positions and the slots."""
    place: Place
    replay: Callable[[], None]
    result: Tensor


class ReplayedFunction:
    """See :meth:`engine.contracts.drafter.DraftEngine.replayed`."""

    def __init__(self, function: Callable[..., Tensor], replaying: Replaying) -> None:
        self._function = function
        self._replaying = replaying
        self._recorded: dict[int, _RecordedFunction | None] = {}
        """By number of tokens; ``None``: cannot be recorded."""

    def __call__(self, *arguments: Tensor, place: Place) -> Tensor:
        count = place.positions.shape[0]
        if not 0 < count <= MOST_TOKENS or not self._replaying.reach(max(place.attention.kv_lens)):
            return self._function(*arguments, place=place)
        if count not in self._recorded:
            self._recorded[count] = self._record(arguments, place)
        recorded = self._recorded[count]
        if recorded is None:
            return self._function(*arguments, place=place)
        recorded.fill((*arguments, place.positions, place.slot_mapping))
        self._replaying.restage(recorded.place, place.attention)
        recorded.replay()
        return recorded.result

    def _record(self, arguments: Sequence[Tensor], place: Place) -> _RecordedFunction | None:
        kept = self._replaying.keep(place)
        own = [argument.clone(memory_format=torch.contiguous_format) for argument in arguments]
        inputs = (*own, kept.positions, kept.slot_mapping)
        assert kept.memory is not None
        results, replay = record(lambda: (self._function(*own, place=kept),), inputs, kept.memory)
        return None if replay is None else _RecordedFunction(row_ops.Copies(inputs), kept, replay, results[0])


# Chains ----------------------------------------------------------------------------------------------------------


class _RecordedChain:
    """Chains of a number of requests, in memory that stays."""

    def __init__(self, rows: DraftRows, state: Tensor | None, tables: DeviceTables, attention: AttentionKernel) -> None:
        """``state``: what the first step is handed of each request."""
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
        self.place = Place(positions, mapping, batch, attention.stage(batch), memory=Memory())
        self.fill = row_ops.Copies((self.slots, self.lengths, self.tokens))
        self.chains = row_ops.Chains(
            blocks.data_ptr(), blocks.stride(0), tables.block_size, count, self.slots.data_ptr(),
            self.lengths.data_ptr(), positions.data_ptr(), mapping.data_ptr(), batch.block_tables.data_ptr(),
            kv_lens.data_ptr(), self.drafts.data_ptr(), MOST_DRAFTS, 0,
        )  # fmt: skip
        self.first: Callable[[], None] | None = None
        self.step: Callable[[], None] | None = None

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
        self._recorded: dict[int, _RecordedChain | None] = {}
        """By number of requests; ``None``: cannot be recorded."""

    def __call__(self, rows: DraftRows, hidden: Tensor | None = None) -> DraftTokens:
        count, width = len(rows.index), rows.width
        fits = 0 < count <= MOST_TOKENS and width <= MOST_DRAFTS
        if not fits or not self._replaying.reach(max(rows.lengths) + width):
            return self._plain(rows, hidden)
        if count not in self._recorded:
            self._recorded[count] = self._record(rows, hidden)
        chain = self._recorded[count]
        if chain is None:
            return self._plain(rows, hidden)
        assert chain.step is not None
        chain.begin(rows, hidden)
        if chain.first is not None:
            chain.first()
        for _ in range(width - chain.chains.made):
            chain.step()
        return DraftTokens(chain.drafts[:, :width])

    def _record(self, rows: DraftRows, hidden: Tensor | None) -> _RecordedChain | None:
        state = None if hidden is None else hidden[rows.last]
        chain = _RecordedChain(rows, state, self._replaying.tables, self._replaying.attention)
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
            if chain.first is None:
                return None
        _, chain.step = record(step, chain.changed, memory)
        return None if chain.step is None else chain
