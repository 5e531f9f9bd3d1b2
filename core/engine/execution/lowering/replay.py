"""Small steps on C++ kernels: the calls of all layers, recorded once for each number of tokens, are one call.

What differs from step to step (the residual, rotations, slots, the staged batch) is copied to where the recorded step
had it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch, AttentionKernel, RestagingKernel
from engine.execution.kv_cache import KVCache
from engine.execution.lowering.recorder import Memory, record
from engine.execution.lowering.recordings import Recordings, Table
from engine.execution.lowering.settings import Lowering, Rotations
from engine.execution.model import ForwardBatch, LoweredOp, SmallSteps, StepContext
from engine.execution.row_ops import Copies

MOST_TOKENS = 16
"""Of a step that is replayed: with more, what Python adds is lost in what the kernels take."""
Layers = Sequence[Sequence[LoweredOp]]


def lower_replay(
    lowering: Lowering, embed: Callable[[Tensor], Tensor], layers: Layers, rotate: Rotations
) -> SmallSteps | None:
    """What runs small steps; ``None`` where every layer has other work than that of C++ kernels."""
    return ReplayedSteps(embed, layers, rotate, lowering.attention) if can_replay(lowering) else None


def can_replay(lowering: Lowering) -> bool:
    return lowering.native and why_not_replayed(lowering) is None


def why_not_replayed(lowering: Lowering) -> str | None:
    """What layers of C++ kernels do besides calling these; ``None``: nothing, as far as the plan tells."""
    if lowering.tp > 1:
        return "ranks exchange their sums"
    if not lowering.stores_kv_as_is:
        return f"keys are stored as {lowering.kv_format.storage_dtype(lowering.dtype_name)}"
    return None if isinstance(lowering.attention, RestagingKernel) else "the attention kernel has no restage()"


@dataclass(frozen=True, slots=True)
class Where:
    """Where some tokens are: what layers need beside the tokens."""

    rotations: tuple[tuple[Tensor, Tensor], ...]
    slots: Tensor
    attention: AttentionBatch

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is copied to where a recording reads it."""
        return (self.slots, *(table for tables in self.rotations for table in tables))

    def clone(self) -> Where:
        tables = tuple((_own(cos), _own(sin)) for cos, sin in self.rotations)
        return Where(tables, _own(self.slots), self.attention)


class ReplayedSteps:
    """Whole steps. See :class:`engine.execution.model.SmallSteps`."""

    def __init__(
        self, embed: Callable[[Tensor], Tensor], layers: Layers, rotate: Rotations, attention: AttentionKernel
    ) -> None:
        self.recordings = Recordings()
        self._embed, self._rotate = embed, rotate
        self._layers = ReplayedLayers(layers, attention, self.recordings, "a step of few tokens")

    def __call__(self, batch: ForwardBatch, kv: KVCache, taps: Sequence[int]) -> tuple[Tensor, list[Tensor]] | None:
        if not self._layers.may_run(batch.token_ids.shape[0], kv, taps):
            return None
        residual, rotations = self._embed(batch.token_ids), self._rotate(batch.positions)
        return self._layers.run(residual, residual, Where(rotations, batch.slot_mapping, batch.attention), kv, taps)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Layers on some number of tokens."""

    replays: tuple[Callable[[], None], ...]
    """The calls of all layers, cut where a hidden state is tapped."""
    residual: Tensor
    staged: Any
    fill: Copies
    """Of the residual, the carry if that is something else, and the place."""
    held: Sequence[Tensor]


class ReplayedLayers:
    """Runs layers for up to :data:`MOST_TOKENS` tokens on one cache."""

    def __init__(self, layers: Layers, attention: AttentionKernel, recordings: Recordings, name: str) -> None:
        """``name``: what the user calls these layers."""
        assert isinstance(attention, RestagingKernel)
        self._layers = layers
        self._stage, self._restage = attention.stage, attention.restage
        self._arena = recordings.arena
        self._recorded: Table[tuple[int, tuple[int, ...]], _Recorded] = recordings.table(name)
        """By number of tokens and taps."""
        self._cache: Callable[[], KVCache | None] = lambda: None

    def may_run(self, tokens: int, kv: KVCache, taps: Sequence[int] = ()) -> bool:
        """Whether :meth:`run` takes so many tokens, as far as is known."""
        return 0 < tokens <= MOST_TOKENS and (self._cache() is not kv or self._recorded.may((tokens, tuple(taps))))

    def run(
        self, residual: Tensor, carry: Tensor, where: Where, kv: KVCache, taps: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]] | None:
        """The residual behind the layers, and the residuals entering the layers ``taps`` (behind the last one: the one
        returned); ``None`` where these layers cannot be recorded. ``carry``: what the first op is handed, perhaps the
        residual itself. The results are the caller's, and what it hands over stays as it is.
        """
        if self._cache() is not kv:
            self._recorded.clear()
            self._cache = weakref.ref(kv)
        key = residual.shape[0], tuple(taps)
        recorded = self._recorded.find(key, partial(self._record, residual, carry, where, kv, key[1]))
        if recorded is None:
            return None
        recorded.fill((*_streams(residual, carry), *where.tensors))
        self._restage(recorded.staged, where.attention)
        states: dict[int, Tensor] = {}
        for (first, _), replay in zip(self._ranges(key[1]), recorded.replays, strict=True):
            if first in key[1]:
                states[first] = recorded.residual.clone()
            replay()
        states[len(self._layers)] = recorded.residual.clone()  # the next step changes it
        return states[len(self._layers)], [states[tap] for tap in taps]

    def _ranges(self, taps: Sequence[int]) -> list[tuple[int, int]]:
        """Stretches of layers between the taps."""
        cuts = sorted({0, len(self._layers), *taps})
        return list(pairwise(cuts))

    def _record(self, residual: Tensor, carry: Tensor, where: Where, kv: KVCache, taps: Sequence[int]) -> _Recorded:
        streams, place = [_own(stream) for stream in _streams(residual, carry)], where.clone()
        context = StepContext(place.rotations, place.slots, self._stage(where.attention), kv)
        handed, replays = streams[-1], []
        for first, end in self._ranges(taps):
            memory = Memory(self._arena)
            stretch = partial(run_layers, self._layers[first:end], streams[0], handed, context, memory)
            replays.append(record(stretch, streams, memory)[1])
            handed = streams[0]
        held = (*streams, *place.tensors)
        return _Recorded(tuple(replays), streams[0], context.staged, Copies(held), held)


def run_layers(
    layers: Layers, residual: Tensor, carry: Tensor, context: StepContext, memory: Memory
) -> tuple[Tensor, ...]:
    """The residual behind layers that are being recorded."""
    for layer in layers:
        with memory.scratch():  # nothing but the residual outlives its layer
            after, carry = run_layer(layer, residual, carry, context)
        if after.data_ptr() != residual.data_ptr():
            memory.reason = "an op that moves the residual"
        residual = after
    return (residual,)


def run_layer(
    layer: Sequence[LoweredOp], residual: Tensor, carry: Tensor, context: StepContext
) -> tuple[Tensor, Tensor]:
    """The residual behind a layer, and what the next one is handed: the residual, too."""
    for op in layer:
        residual, carry = op(residual, carry, context)
    return residual, residual


def _streams(residual: Tensor, carry: Tensor) -> tuple[Tensor, ...]:
    """What the first layer is handed, the same tensor once."""
    return (residual,) if carry is residual else (residual, carry)


def _own(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
