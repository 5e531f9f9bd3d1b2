"""A model ready to run: embed, layers and head as callables over the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch, AttentionKernel, LayerCache
from engine.kernels.cpu.program import scratch
from engine.kernels.cpu.row_ops import cloned
from engine.kernels.torch.reference import most_likely

if TYPE_CHECKING:
    from engine.kernels.cpu.captured import CapturedSteps


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's tokens, rows one after another."""

    token_ids: Tensor
    """int64 ``[num_tokens]``"""
    positions: Tensor
    """int64 ``[num_tokens]``"""
    slot_mapping: Tensor
    """int64 ``[num_tokens]``: where each token's key and value go, ``block * block_size + offset``."""
    attention: AttentionBatch
    row_ids: Tensor
    """int64 ``[num_tokens]``: the row of the device tables each token belongs to."""


class Cache(Protocol):
    """What layers need of the cache: :class:`engine.kv.cache.KVCache` has it."""

    block_size: int
    layers: tuple[LayerCache, ...]

    def write(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers of one step share."""

    rotations: tuple[tuple[Tensor, Tensor], ...]
    """Cosine and sine tables, one pair for each distinct rotation of the model."""
    slot_mapping: Tensor
    prepared: Any
    """What the attention kernel prepared."""
    kv: Cache


LoweredOp = Callable[[Tensor, Tensor, StepContext], tuple[Tensor, Tensor]]
"""``(residual, hidden_states, context) -> (residual, hidden_states)``. Hidden states are what one op hands to the next:
queries, the attention output, the activated gate. An op may change the residual in place."""


def run_layer(
    layer: Sequence[LoweredOp], residual: Tensor, hidden_states: Tensor, context: StepContext
) -> tuple[Tensor, Tensor]:
    """The residual behind a layer, and what the next one is handed: the residual, too."""
    with scratch(residual):  # nothing but the residual outlives its layer
        for op in layer:
            residual, hidden_states = op(residual, hidden_states, context)
    return residual, residual


@dataclass(frozen=True, slots=True)
class LoweredModel:
    """Made by :func:`engine.kernels.loading.load_model`; ``embed``, ``layers[i]`` and ``project`` also run alone."""

    embed: Callable[[Tensor], Tensor]
    """``token_ids [T] -> residual [T, hidden_size]``"""
    layers: tuple[tuple[LoweredOp, ...], ...]
    project: Callable[[Tensor], Tensor]
    """``residual [R, hidden_size] -> logits [R, vocab]`` float32, the final norm included."""
    lm_head: Callable[[Tensor], Tensor]
    """:attr:`project` without the norm: for rows that are normed already."""
    rotate: Callable[[Tensor], tuple[tuple[Tensor, Tensor], ...]]
    """``positions [T]`` -> :attr:`StepContext.rotations`"""
    attention: AttentionKernel
    lowering: tuple[str, ...]
    """What runs for each kind of op, one line each, for the plan."""
    weights_bytes: int
    on_triton: bool = False
    """Lowered to Triton kernels: tokens are chosen by such kernels too."""
    project_greedy: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    """:attr:`project` and the most likely tokens as :meth:`greedy` has them, where a kernel finds both at once."""
    capturable: bool = False
    """Steps of few tokens may run as programs, as far as the plan tells."""
    why_uncaptured: str = ""
    """Why they may not, where they might with other plugins."""
    small_steps: CapturedSteps | None = None
    """Steps of few tokens on one cache as programs: see :func:`engine.kernels.cpu.captured.capture_steps`."""
    kv_scales: tuple[tuple[Tensor, Tensor] | None, ...] = ()
    """By layer, the checkpoint's scales for cached keys and for cached values in float8 (e4m3), float32
    ``[num_kv_heads]`` on the device: a stored number times its scale is the key. ``None`` where it has none."""

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: Cache, aux_layers: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """Run all layers and write the batch's keys and values.

        Returns the residual stream ``[T, hidden_size]`` before the final norm, and for each of
        ``aux_layers`` the residual entering that layer (``num_layers``: the one returned), ``[T, hidden_size]``.
        """
        if self.small_steps is not None:
            done = self.small_steps(batch, kv, aux_layers)
            if done is not None:
                return done
        return self.run(batch, kv, self.attention.prepare(batch.attention), aux_layers)

    @torch.inference_mode()
    def run(
        self, batch: ForwardBatch, kv: Cache, prepared: Any, aux_layers: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """:meth:`forward` with what the attention kernel prepared for this batch: the part that can be captured, or
        written as a program, of values."""
        context = StepContext(
            rotations=self.rotate(batch.positions), slot_mapping=batch.slot_mapping, prepared=prepared, kv=kv
        )
        residual = self.embed(batch.token_ids)
        aux: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in aux_layers:
                aux[index] = cloned(residual)  # layers add to the residual in place
            residual, _ = run_layer(layer, residual, residual, context)
        aux[len(self.layers)] = residual
        return residual, [aux[aux_layer] for aux_layer in aux_layers]

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """``[R, hidden_size]`` residual rows -> float32 logits ``[R, vocab]``."""
        return self.project(hidden)

    @torch.inference_mode()
    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`head`, and the most likely token of each row, int64 ``[R]``: the lowest id among equals, -1 where
        logits are broken."""
        if self.project_greedy is not None:
            return self.project_greedy(hidden)
        logits = self.project(hidden)
        return logits, most_likely(logits)
