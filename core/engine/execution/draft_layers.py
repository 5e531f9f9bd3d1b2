"""Layers that a drafter runs: its own ones or the target's first."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.contracts.attention_kernel import AttentionKernel
from engine.execution.kv_cache import KVCache
from engine.execution.lowering import Memory, ReplayedLayers, RotationTables, Where
from engine.execution.model import LoweredOp, StepContext
from engine.execution.places import Place, Rotate


class Layers:
    """Layers on the cache. Fulfils :class:`engine.contracts.drafter.DraftLayers`."""

    def __init__(
        self,
        layers: Sequence[Sequence[LoweredOp]],
        rotate: Rotate,
        attention: AttentionKernel,
        kv: KVCache,
        tables: RotationTables | None,
    ) -> None:
        """``tables``: of ``rotate``, where layers can be recorded (:mod:`engine.execution.lowering.recorder`); whoever
        records has them reach far enough. ``None``: these layers cannot."""
        self._layers = layers
        self._rotate = rotate
        self._attention = attention
        self._kv = kv
        self._replayed = None if tables is None else ReplayedLayers(layers, attention)
        self._tables = tables

    def run(self, residual: Tensor, carry: Tensor, place: Place) -> Tensor:
        if place.memory is not None:
            return self._record(residual, carry, place, place.memory)
        if self._replayed is not None and self._replayed.can_run(residual.shape[0], self._kv):
            where = Where(place.rotations(self._rotate), place.slot_mapping, place.attention)
            return self._replayed.run(residual, carry, where, self._kv)[0]
        context = self._context(place)
        for layer in self._layers:
            residual, carry = _run_layer(layer, residual, carry, context)
        return residual

    def write(self, carry: Tensor, place: Place) -> None:
        self._layers[0][0](carry, carry, self._context(place))

    def _record(self, residual: Tensor, carry: Tensor, place: Place, memory: Memory) -> Tensor:
        context = self._context(place)
        for layer in self._layers:
            with memory.scratch():  # nothing but the residual outlives its layer
                after, carry = _run_layer(layer, residual, carry, context)
            if after.data_ptr() != residual.data_ptr():
                memory.reason = "an op that moves the residual"
            residual = after
        return residual

    def _context(self, place: Place) -> StepContext:
        rotate = self._rotate if place.memory is None or self._tables is None else self._tables
        return place.context(rotate, self._attention, self._kv)


def _run_layer(
    layer: Sequence[LoweredOp], residual: Tensor, carry: Tensor, context: StepContext
) -> tuple[Tensor, Tensor]:
    """The residual behind a layer, and what the next one is handed: the residual, too."""
    for op in layer:
        residual, carry = op(residual, carry, context)
    return residual, residual
