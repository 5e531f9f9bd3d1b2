"""Layers that a drafter runs: its own ones or the target's first."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.contracts.attention_kernel import AttentionKernel
from engine.execution.kv_cache import KVCache
from engine.execution.model import LoweredOp, run_layer
from engine.execution.places import Place, Rotate


class Layers:
    """Layers on the cache, of tensors or of values. Fulfils :class:`engine.contracts.drafter.DraftLayers`."""

    def __init__(
        self, layers: Sequence[Sequence[LoweredOp]], rotate: Rotate, attention: AttentionKernel, kv: KVCache
    ) -> None:
        self._layers = layers
        self._rotate = rotate
        self._attention = attention
        self._kv = kv

    def run(self, residual: Tensor, carry: Tensor, place: Place) -> Tensor:
        context = place.context(self._rotate, self._attention, self._kv)
        for layer in self._layers:
            residual, carry = run_layer(layer, residual, carry, context)
        return residual

    def write(self, carry: Tensor, place: Place) -> None:
        self._layers[0][0](carry, carry, place.context(self._rotate, self._attention, self._kv))
