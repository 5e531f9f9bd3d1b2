"""Small steps on C++ kernels: the calls of all layers, recorded once for each number of tokens, are one call.

What differs from step to step (the residual, rotations, slots, the staged batch) is copied to where the recorded step
had it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from engine import native
from engine.contracts.attention_kernel import AttentionBatch, AttentionKernel, RestagingKernel
from engine.execution.kv_cache import KVCache
from engine.execution.lowering.recorder import POISON, Memory
from engine.execution.lowering.settings import Lowering, Rotations
from engine.execution.model import ForwardBatch, LoweredOp, SmallSteps, StepContext

MOST_TOKENS = 16
"""Of a step that is replayed: with more, what Python adds is lost in what the kernels take."""
Layers = Sequence[Sequence[LoweredOp]]


def lower_replay(
    lowering: Lowering, embed: Callable[[Tensor], Tensor], layers: Layers, rotate: Rotations
) -> SmallSteps | None:
    """What runs small steps; ``None`` where every layer has other work than that of C++ kernels."""
    return ReplayedSteps(embed, layers, rotate, lowering.attention) if can_replay(lowering) else None


def can_replay(lowering: Lowering) -> bool:
    whole = lowering.tp == 1 and lowering.stores_kv_as_is
    return lowering.native and whole and isinstance(lowering.attention, RestagingKernel)


@dataclass(frozen=True, slots=True)
class Where:
    """Where some tokens are: what layers need beside the tokens."""

    rotations: tuple[tuple[Tensor, Tensor], ...]
    slots: Tensor
    attention: AttentionBatch


class ReplayedSteps:
    """Whole steps. See :data:`engine.execution.model.SmallSteps`."""

    def __init__(
        self, embed: Callable[[Tensor], Tensor], layers: Layers, rotate: Rotations, attention: AttentionKernel
    ) -> None:
        self._embed, self._rotate = embed, rotate
        self._layers = ReplayedLayers(layers, attention)

    def __call__(self, batch: ForwardBatch, kv: KVCache, taps: Sequence[int]) -> tuple[Tensor, list[Tensor]] | None:
        if not self._layers.can_run(batch.token_ids.shape[0], kv, taps):
            return None
        residual, rotations = self._embed(batch.token_ids), self._rotate(batch.positions)
        return self._layers.run(residual, residual, Where(rotations, batch.slot_mapping, batch.attention), kv, taps)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Layers on some number of tokens. The tensors are those its calls point at."""

    replays: tuple[Callable[[], None], ...]
    """The calls of all layers, cut where a hidden state is tapped."""
    residual: Tensor
    carry: Tensor
    """The residual itself where the layers are handed nothing else."""
    where: Where
    staged: Any
    buffers: Sequence[Tensor]

    def fill(self, residual: Tensor, carry: Tensor) -> None:
        self.residual.copy_(residual)
        if self.carry is not self.residual:
            self.carry.copy_(carry)


class ReplayedLayers:
    """Runs layers for up to :data:`MOST_TOKENS` tokens on one cache."""

    def __init__(self, layers: Layers, attention: AttentionKernel) -> None:
        assert isinstance(attention, RestagingKernel)
        self._layers = layers
        self._stage, self._restage = attention.stage, attention.restage
        self._recorded: dict[tuple[int, tuple[int, ...]], _Recorded | None] = {}
        """By number of tokens and taps; ``None``: these calls cannot be made again."""
        self._cache: Callable[[], KVCache | None] = lambda: None

    def can_run(self, tokens: int, kv: KVCache, taps: Sequence[int] = ()) -> bool:
        """Whether :meth:`run` takes so many tokens, as far as is known."""
        if not 0 < tokens <= MOST_TOKENS:
            return False
        return self._cache() is not kv or self._recorded.get((tokens, tuple(taps)), True) is not None

    def run(
        self, residual: Tensor, carry: Tensor, where: Where, kv: KVCache, taps: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """The residual behind the layers, and the residuals entering the layers ``taps`` (behind the last one: the one
        returned). ``carry``: what the first op is handed, perhaps the residual itself. The results are the caller's.
        """
        if self._cache() is not kv:
            self._recorded.clear()
            self._cache = weakref.ref(kv)
        key = residual.shape[0], tuple(taps)
        recorded = self._recorded.get(key)
        if recorded is None:
            result, self._recorded[key] = self._record(residual, carry, where, kv, key[1])
            return result
        recorded.fill(residual, carry)
        recorded.where.slots.copy_(where.slots)
        for kept, tables in zip(recorded.where.rotations, where.rotations, strict=True):
            for to, table in zip(kept, tables, strict=True):
                to.copy_(table)
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

    def _record(
        self, residual: Tensor, carry: Tensor, where: Where, kv: KVCache, taps: tuple[int, ...]
    ) -> tuple[tuple[Tensor, list[Tensor]], _Recorded | None]:
        """Run the layers and record them."""
        own = residual.clone()
        own_carry = own if carry is residual else carry.clone()
        tables = tuple((cos.clone(), sin.clone()) for cos, sin in where.rotations)
        kept = Where(tables, where.slots.clone(), where.attention)
        context = StepContext(kept.rotations, kept.slots, self._stage(where.attention), kv)
        memory, recordings = Memory(), []
        states: dict[int, Tensor] = {}
        current, handed = own, own_carry
        for first, end in self._ranges(taps):
            states[first] = current.clone()
            with native.recording() as recording, memory:
                for layer in self._layers[first:end]:
                    with memory.scratch():  # nothing but the residual outlives its layer
                        for op in layer:
                            current, handed = op(current, handed, context)
                    handed = current
                    if current.data_ptr() != own.data_ptr():
                        memory.reason = "an op that moves the residual"
            recordings.append(recording)
        after = states[len(self._layers)] = current.clone()
        result = after, [states[tap] for tap in taps]
        if memory.reason is not None or any(recording.reason is not None for recording in recordings):
            return result, None
        replays = tuple(recording.replay() for recording in recordings)
        step = _Recorded(replays, own, own_carry, kept, context.staged, memory.buffers)
        return result, step if _computes(step, residual, carry, after) else None


def _computes(step: _Recorded, residual: Tensor, carry: Tensor, after: Tensor) -> bool:
    """Whether a replay makes ``after`` of these, bit for bit: an op may also work where nobody notes it."""
    for buffer in step.buffers:
        buffer.fill_(POISON)
    step.fill(residual, carry)
    for replay in step.replays:
        replay()
    return torch.equal(step.residual.view(torch.uint8), after.view(torch.uint8))
