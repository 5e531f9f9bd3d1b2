"""Small steps on C++ kernels: the calls of all layers, recorded once for each number of tokens, are one call.

What differs from step to step (the residual, rotations, slots, the staged batch) is copied to where the recorded step
had it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch, AttentionKernel, RestagingKernel
from engine.contracts.kv_format import KVFormat
from engine.execution import row_ops
from engine.execution.kv_cache import KVCache
from engine.execution.lowering.recorder import Memory, record
from engine.execution.lowering.recordings import Recordings, Table
from engine.execution.lowering.settings import Lowering, Rotations, stores_as_is
from engine.execution.model import ForwardBatch, LoweredOp, SmallSteps, StepContext
from engine.execution.row_ops import Copies

MOST_TOKENS = 16
"""Of a step that is replayed: with more, what Python adds is lost in what the kernels take."""
Layers = Sequence[Sequence[LoweredOp]]
EMPTY: Mapping[int, Tensor] = MappingProxyType({})


def lower_replay(
    lowering: Lowering, embed: Callable[[Tensor], Tensor], layers: Layers, rotate: Rotations
) -> SmallSteps | None:
    """What runs small steps; ``None`` where every layer has other work than that of C++ kernels."""
    return ReplayedSteps(embed, layers, rotate, lowering.attention) if can_replay(lowering) else None


def can_replay(lowering: Lowering) -> bool:
    return lowering.native and why_not_replayed(lowering) is None


def why_not_replayed(lowering: Lowering) -> str | None:
    """See :func:`replay_obstacle`."""
    return replay_obstacle(lowering.kv_format, lowering.dtype_name, lowering.attention, lowering.tp)


def replay_obstacle(kv_format: KVFormat, dtype: str, attention: AttentionKernel, ranks: int) -> str | None:
    """What layers of C++ kernels do besides calling these; ``None``: nothing, as far as the plan tells. ``ranks``: over
    which their weights are split."""
    if ranks > 1:
        return "ranks exchange their sums"
    if not stores_as_is(kv_format, dtype):
        return f"keys are stored as {kv_format.storage_dtype(dtype)}"
    return None if isinstance(attention, RestagingKernel) else "the attention kernel has no restage()"


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

    replay: Callable[[], None]
    states: Tensor
    """What :func:`_cuts` says of it, ``[cuts, num_tokens, hidden]``."""
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
        recorded.replay()
        states = recorded.states.clone()  # the next step changes them
        cuts = self._cuts(key[1])
        return states[-1], [states[cuts.index(tap)] for tap in taps]

    def _cuts(self, taps: Sequence[int]) -> list[int]:
        """Layers that are entered with a residual that is wanted; the last one is behind all layers."""
        return sorted({len(self._layers), *taps})

    def _record(self, residual: Tensor, carry: Tensor, where: Where, kv: KVCache, taps: Sequence[int]) -> _Recorded:
        streams, place = [_own(stream) for stream in _streams(residual, carry)], where.clone()
        context = StepContext(place.rotations, place.slots, self._stage(where.attention), kv)
        cuts, memory = self._cuts(taps), Memory(self._arena)
        states = streams[0][None] if len(cuts) == 1 else streams[0].new_empty(len(cuts), *streams[0].shape)

        def run() -> Sequence[Tensor]:
            tapped = dict(zip(cuts, states, strict=True))
            run_layers(self._layers, streams[0], streams[-1], context, memory, tapped)
            return (streams[0], states)

        replay = record(run, streams, memory)[1]
        held = (*streams, *place.tensors)
        return _Recorded(replay, states, context.staged, Copies(held), held)


def run_layers(
    layers: Layers,
    residual: Tensor,
    carry: Tensor,
    context: StepContext,
    memory: Memory,
    tapped: Mapping[int, Tensor] = EMPTY,
) -> Tensor:
    """The residual behind layers that are being recorded. ``tapped``: where to copy what enters some of them, that
    which leaves the last one under their number."""
    for i, layer in enumerate(layers):
        _keep(residual, tapped.get(i))
        with memory.scratch():  # nothing but the residual outlives its layer
            after, carry = run_layer(layer, residual, carry, context)
        if after.data_ptr() != residual.data_ptr():
            memory.reason = "an op that moves the residual"
        residual = after
    _keep(residual, tapped.get(len(layers)))
    return residual


def _keep(residual: Tensor, place: Tensor | None) -> None:
    if place is not None and place.data_ptr() != residual.data_ptr():
        row_ops.copy(residual, place)


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
