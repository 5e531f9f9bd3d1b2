"""Layers that a drafter runs: its own ones or the target's first."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.contracts.attention_kernel import AttentionKernel
from engine.kernels.context import Rotate
from engine.kernels.metadata import ForwardMetadata
from engine.kernels.model import LoweredBlock, run_layer
from engine.kv.cache import KVCache


class Layers:
    """Layers on the cache, of tensors or of values. Fulfils :class:`engine.contracts.drafter.DraftLayers`."""

    def __init__(
        self,
        inputs: Sequence[int],
        layers: Sequence[LoweredBlock],
        residual: int,
        rotate: Rotate,
        attention: AttentionKernel,
        kv: KVCache,
    ) -> None:
        """``inputs``: the numbers of the values that are handed in; ``residual``: of that after the last layer."""
        self._inputs = inputs
        self._layers = layers
        self._residuals = [*(each for layer in layers[1:] if (each := layer.residual) is not None), residual]
        self._rotate = rotate
        self._attention = attention
        self._kv = kv

    def run(self, *inputs: Tensor, metadata: ForwardMetadata) -> Tensor:
        if len(inputs) != len(self._inputs):
            raise ValueError(f"{len(inputs)} values enter layers that read {len(self._inputs)}: enter() has them all")
        context = metadata.context(self._rotate, self._attention, self._kv)
        values = dict(zip(self._inputs, inputs, strict=True))
        for layer, following in zip(self._layers, self._residuals, strict=True):
            run_layer(layer, values, context, following)
        return values[self._residuals[-1]]

    def write(self, x: Tensor, metadata: ForwardMetadata) -> None:
        context = metadata.context(self._rotate, self._attention, self._kv)
        steps = self._layers[0].steps
        last = next(index for index, step in enumerate(steps) if step.writes is not None)
        LoweredBlock(steps[: last + 1]).run(dict.fromkeys(self._inputs, x), context)
