"""Small steps on C++ kernels: the calls of all layers, recorded once for each number of tokens, are one call.

A recorded call has its pointers in it, so its memory must stay: what a recorded step allocates comes from buffers of
the recording, and what differs from step to step (the residual, rotations, slots, the staged batch) is copied to where
the recorded step had it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine import native
from engine.contracts.attention_kernel import AttentionKernel, RestagingKernel
from engine.execution.kv_cache import KVCache
from engine.execution.lowering.settings import Lowering, Rotations
from engine.execution.model import ForwardBatch, LoweredOp, SmallSteps, StepContext

MOST_TOKENS = 16
"""Of a step that is replayed: with more, what Python adds is lost in what the kernels take."""
POISON = 0xFF
"""Of bytes: as floats they are NaN."""


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
class _Recorded:
    """A step of some number of tokens. The tensors are those its calls point at."""

    replay: Callable[[], None]
    residual: Tensor
    rotations: tuple[tuple[Tensor, Tensor], ...]
    slots: Tensor
    staged: Any
    buffers: Sequence[Tensor]


class ReplayedSteps:
    """Runs steps of up to :data:`MOST_TOKENS` tokens on one cache. See :data:`engine.execution.model.SmallSteps`."""

    def __init__(
        self, embed: Callable[[Tensor], Tensor], layers: Layers, rotate: Rotations, attention: AttentionKernel
    ) -> None:
        assert isinstance(attention, RestagingKernel)
        self._embed, self._layers, self._rotate = embed, layers, rotate
        self._stage, self._restage = attention.stage, attention.restage
        self._recorded: dict[int, _Recorded | None] = {}
        """By number of tokens; ``None``: its calls cannot be made again."""
        self._cache: Callable[[], KVCache | None] = lambda: None

    def __call__(self, batch: ForwardBatch, kv: KVCache) -> Tensor | None:
        tokens = batch.token_ids.shape[0]
        if tokens > MOST_TOKENS:
            return None
        if self._cache() is not kv:
            self._recorded.clear()
            self._cache = weakref.ref(kv)
        if tokens not in self._recorded:
            result, self._recorded[tokens] = self._record(batch, kv)
            return result
        recorded = self._recorded[tokens]
        if recorded is None:
            return None
        recorded.residual.copy_(self._embed(batch.token_ids))
        recorded.slots.copy_(batch.slot_mapping)
        for kept, tables in zip(recorded.rotations, self._rotate(batch.positions), strict=True):
            for to, table in zip(kept, tables, strict=True):
                to.copy_(table)
        self._restage(recorded.staged, batch.attention)
        recorded.replay()
        return recorded.residual.clone()  # the next step changes it

    def _record(self, batch: ForwardBatch, kv: KVCache) -> tuple[Tensor, _Recorded | None]:
        """Run a step and record it."""
        residual, slots = self._embed(batch.token_ids), batch.slot_mapping.clone()
        before = residual.clone()
        context = StepContext(self._rotate(batch.positions), slots, self._stage(batch.attention), kv)
        with native.recording() as recording, _LayerMemory() as memory:
            current = residual
            for layer in self._layers:
                memory.begin_layer()
                carry = current
                for op in layer:
                    current, carry = op(current, carry, context)
                if current.data_ptr() != residual.data_ptr():
                    memory.reason = "an op that moves the residual"
        after = current.clone()
        if memory.reason is not None or recording.reason is not None:
            return after, None
        step = _Recorded(recording.replay(), residual, context.rotations, slots, context.staged, memory.buffers)
        return after, step if _computes(step, before, after) else None


def _computes(step: _Recorded, before: Tensor, after: Tensor) -> bool:
    """Whether a replay makes ``after`` of ``before``, bit for bit: an op may also work where nobody notes it."""
    for buffer in step.buffers:
        buffer.fill_(POISON)
    step.residual.copy_(before)
    step.replay()
    return torch.equal(step.residual.view(torch.uint8), after.view(torch.uint8))


class _LayerMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Where ops of a recorded step allocate: the n-th allocation of a layer is the same memory in every layer. Nothing
    but the residual outlives its layer."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reason: str | None = None
        """What an op did besides allocating, viewing and calling native functions; ``None``: nothing."""
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self._next = 0

    @property
    def buffers(self) -> list[Tensor]:
        return list(self._buffers.values())

    def begin_layer(self) -> None:
        self._next = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.new_empty.default and self.reason is None:
            return self._buffer(result)
        if not func.is_view and self.reason is None:
            self.reason = f"{func} in an op"
        return result

    def _buffer(self, like: Tensor) -> Tensor:
        """Memory of this recording for a contiguous tensor."""
        key = self._next, like.nbytes
        self._next += 1
        if key not in self._buffers:
            self._buffers[key] = torch.empty(like.nbytes, dtype=torch.uint8)
        return self._buffers[key].view(like.dtype).view(like.shape)
