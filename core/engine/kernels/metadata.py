"""Where tokens are in the cache: what layers need beside the tokens themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch, AttentionKernel
from engine.kernels.context import Cache, Rotate, StepContext, prepared_of


@dataclass(slots=True)
class ForwardMetadata:
    """Positions, cache slots and attention metadata of some tokens."""

    positions: Tensor
    """int64 ``[num_tokens]``. While a program is written, this and the slots are values."""
    slot_mappings: tuple[Tensor, ...]
    attention: tuple[AttentionBatch, ...]
    """By KV group, as the slots are."""
    prepared: tuple[Any, ...] | None = None
    """By the attention kernel, when it is first needed, for each group."""
    chain: Chained | None = None
    """The steps of a chain that this one was made with; :attr:`index` is its own."""
    index: int = 0

    def context(self, rotate: Rotate, attention: AttentionKernel, kv: Cache) -> StepContext:
        if self.prepared is None:
            self.prepared = prepared_of(attention, self.attention)
        rotations = self.rotations(rotate)
        return StepContext(rotations, self.slot_mappings, self.prepared, kv, self.positions, self.attention)

    def rotations(self, rotate: Rotate) -> tuple[tuple[Tensor, Tensor], ...]:
        return rotate(self.positions) if self.chain is None else self.chain.rotations(rotate)[self.index]


@dataclass(slots=True)
class Chained:
    """Steps of a chain share the tables of their rotations."""

    positions: Tensor
    """int64 ``[steps, num_rows]``"""
    _by_layers: dict[int, list[tuple[tuple[Tensor, Tensor], ...]]] = field(default_factory=dict)

    def rotations(self, rotate: Rotate) -> list[tuple[tuple[Tensor, Tensor], ...]]:
        """Tables by step."""
        found = self._by_layers.get(id(rotate))
        if found is None:
            steps, rows = self.positions.shape
            tables = rotate(self.positions.flatten())
            cuts = [slice(step * rows, (step + 1) * rows) for step in range(steps)]
            found = [tuple((cos[cut], sin[cut]) for cos, sin in tables) for cut in cuts]
            self._by_layers[id(rotate)] = found
        return found
