"""Layers that a drafter runs: its own ones or the target's first."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.contracts.attention_kernel import AttentionKernel
from engine.kernels.metadata import ForwardMetadata, Rotate
from engine.kernels.model import LoweredOp, run_layer
from engine.kv.cache import KVCache


class Layers:
    """Layers on the cache, of tensors or of values. Fulfils :class:`engine.contracts.drafter.DraftLayers`."""

    def __init__(
        self, layers: Sequence[Sequence[LoweredOp]], rotate: Rotate, attention: AttentionKernel, kv: KVCache
    ) -> None:
        self._layers = layers
        self._rotate = rotate
        self._attention = attention
        self._kv = kv

    def run(self, residual: Tensor, hidden_states: Tensor, metadata: ForwardMetadata) -> Tensor:
        context = metadata.context(self._rotate, self._attention, self._kv)
        for layer in self._layers:
            residual, hidden_states = run_layer(layer, residual, hidden_states, context)
        return residual

    def write(self, hidden_states: Tensor, metadata: ForwardMetadata) -> None:
        self._layers[0][0](hidden_states, hidden_states, metadata.context(self._rotate, self._attention, self._kv))
