"""What layers are handed in a step: its tokens, the cache, and what all of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch, AttentionKernel, LayerCache


class DealtTokens(Protocol):
    """The tokens of a step that ranks share out: :class:`engine.ranks.context_parallel.DealtStep`."""

    def written(self, kv: Cache, cache: int) -> None:
        """A cache has the keys and values of this rank's tokens: bring in those of all others."""
        ...

    def gathered(self, x: Tensor) -> Tensor:
        """``x [own tokens, ...]`` of all ranks, one after another."""
        ...

    def summed(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``, of tokens as :meth:`gathered` has them: this rank's tokens."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's tokens, rows one after another."""

    token_ids: Tensor
    """int64 ``[num_tokens]``"""
    positions: Tensor
    """int64 ``[num_tokens]``"""
    slot_mappings: tuple[Tensor, ...]
    """By KV group, int64 ``[num_tokens]``: where each token's key and value go, ``block * block_size + offset``."""
    attention: tuple[AttentionBatch, ...]
    """By KV group: they differ in block tables alone."""
    row_ids: Tensor
    """int64 ``[num_tokens]``: the row of the device tables each token belongs to."""
    dealt: DealtTokens | None = None
    """Where ranks share out the tokens of a step: these are this rank's."""


@dataclass(frozen=True, slots=True)
class StateCache:
    """What one recurrent op left, see :class:`engine.contracts.graph.StateSpec`."""

    tokens: Tensor
    """float32 ``[num_blocks, block_size, token_size]``"""
    states: Tensor
    """float32 ``[num_blocks, state_size]``"""


class Cache(Protocol):
    """What layers need of the cache: :class:`engine.kv.cache.KVCache` has it."""

    block_size: int
    num_groups: int
    """Of the whole model: a pipeline stage may have no cache of some."""
    group_of: tuple[int, ...]
    """The KV group of each cache."""
    layers: Mapping[int, LayerCache]
    """By cache, of keys and values."""
    states: Mapping[int, StateCache]
    """By cache, of recurrent ops."""

    def write(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor | None = None) -> None: ...

    def stored(self, cache: int, slots: Tensor) -> Tensor: ...

    def store(self, cache: int, slots: Tensor, stored: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers of one step share."""

    rotations: tuple[tuple[Tensor, Tensor], ...]
    """Cosine and sine tables, one pair for each distinct rotation of the model."""
    slot_mappings: tuple[Tensor, ...]
    """By KV group."""
    prepared: tuple[Any, ...]
    """What the attention kernel prepared for each KV group."""
    kv: Cache
    positions: Tensor
    """int64 ``[num_tokens]``"""
    batches: tuple[AttentionBatch, ...]
    """By KV group."""
    dealt: DealtTokens | None = None
    """As :attr:`ForwardBatch.dealt`."""
    row_ids: Tensor | None = None
    """See :attr:`ForwardBatch.row_ids`; ``None`` after a step, where there is no padding."""

    def slots(self, cache: int) -> Tensor:
        """Where the keys and values of a cache go."""
        return self.slot_mappings[self.kv.group_of[cache]]


Call = Callable[..., Any]
"""``(context, *inputs)`` -> what a kernel makes of ``[num_tokens, size]`` tensors: one, a tuple of several, or
``None``. ``context``: a :class:`StepContext`; ``None`` outside of the layers."""
Greedy = Callable[[Tensor, "Tensor | None"], tuple[Tensor, Tensor]]
"""Residual rows, and where their logits are to be, float32 ``[R, vocab]`` (``None``: anywhere) -> logits, tokens."""
Rotate = Callable[[Tensor], tuple[tuple[Tensor, Tensor], ...]]


def prepared_of(attention: AttentionKernel, batches: Sequence[AttentionBatch]) -> tuple[Any, ...]:
    """What an attention kernel prepares for each KV group."""
    return tuple([attention.prepare(batch) for batch in batches])
