"""Layers that a drafter runs: its own ones or the target's first."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.contracts.attention_kernel import AttentionKernel
from engine.execution.kv_cache import KVCache
from engine.execution.lowering import Recordings, ReplayedLayers, RotationTables, Where, run_layer, run_layers
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
        recordings: Recordings | None,
    ) -> None:
        """``tables``: of ``rotate``, where layers can be recorded (:mod:`engine.execution.lowering.recorder`); whoever
        records has them reach far enough. ``None``, as ``recordings``: these layers cannot."""
        self._layers = layers
        self._rotate = rotate
        self._attention = attention
        self._kv = kv
        self._replayed = None
        if tables is not None and recordings is not None:
            self._replayed = ReplayedLayers(layers, attention, recordings, "the drafter's layers")
        self._tables = tables

    def run(self, residual: Tensor, carry: Tensor, place: Place) -> Tensor:
        if place.memory is not None:
            return run_layers(self._layers, residual, carry, self._context(place), place.memory)
        if self._replayed is not None and self._replayed.may_run(residual.shape[0], self._kv):
            where = Where(place.rotations(self._rotate), place.slot_mapping, place.attention)
            done = self._replayed.run(residual, carry, where, self._kv)
            if done is not None:
                return done[0]
        context = self._context(place)
        for layer in self._layers:
            residual, carry = run_layer(layer, residual, carry, context)
        return residual

    def write(self, carry: Tensor, place: Place) -> None:
        self._layers[0][0](carry, carry, self._context(place))

    def _context(self, place: Place) -> StepContext:
        rotate = self._rotate if place.memory is None or self._tables is None else self._tables
        return place.context(rotate, self._attention, self._kv)
