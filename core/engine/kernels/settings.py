"""Where and how a model is lowered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionKernel, NativeAttention
from engine.contracts.kv_format import KVFormat
from engine.contracts.model import RopeFacts
from engine.contracts.ops import NormSpec
from engine.contracts.parallelism import Parallelism
from engine.contracts.quantizer import PackedLinear
from engine.kernels.cpu.layer_ops import compiled_norm
from engine.kernels.torch.norms import Norm, cpu_norm, gpu_norm, rms_norm

Kernels = Literal["reference", "torch", "native", "triton"]
Linear = Callable[[Tensor], Tensor]
InputNorm = Callable[[Tensor, Tensor], Tensor]
Rotations = Callable[[Tensor], tuple[tuple[Tensor, Tensor], ...]]

MOST_TOKENS = 16
"""Of a step that runs as a program: with more, what Python adds is lost in what the kernels take."""


def stores_as_is(kv_format: KVFormat, dtype: str) -> bool:
    """Whether a cache of this format stores keys and values of ``dtype`` as they are."""
    return kv_format.scale == "none" and kv_format.storage_dtype(dtype) == dtype


def replay_obstacle(kv_format: KVFormat, dtype: str, attention: AttentionKernel, ranks: int) -> str | None:
    """What layers of C++ kernels do besides calling these, so that no step can be a program; ``None``: nothing, as far
    as the plan tells. ``ranks``: over which their weights are split."""
    if ranks > 1:
        return "ranks exchange their sums"
    if not stores_as_is(kv_format, dtype):
        return f"keys are stored as {kv_format.storage_dtype(dtype)}"
    return None if isinstance(attention, NativeAttention) else "the attention kernel has no native calls"


@dataclass(frozen=True, slots=True)
class Lowering:
    """Where and how a model is lowered."""

    device: str
    dtype: torch.dtype
    attention: AttentionKernel
    kv_format: KVFormat
    parallelism: Parallelism
    rope_kinds: tuple[RopeFacts, ...]
    """The distinct rotations of the model; their order is that of ``StepContext.rotations``."""
    kernels: Kernels = "torch"
    """What ops are lowered to. ``torch``: torch ops; ``native``: C++ kernels built on this machine (CPU, float32 and
    bfloat16); ``triton``: fused kernels (CUDA, or Triton's interpreter); ``reference``: the plainest chain of torch
    ops, for tests and for judging a fast path."""

    @property
    def on_cpu(self) -> bool:
        return torch.device(self.device).type == "cpu"

    @property
    def fused(self) -> bool:
        return self.kernels != "reference"

    @property
    def native(self) -> bool:
        return self.kernels == "native"

    @property
    def why_uncaptured(self) -> str | None:
        """See :func:`replay_obstacle`. ``None``: steps of few tokens may run as programs."""
        return replay_obstacle(self.kv_format, self.dtype_name, self.attention, self.tp)

    @property
    def stores_kv_as_is(self) -> bool:
        """Whether the cache stores keys and values as they are."""
        return stores_as_is(self.kv_format, self.dtype_name)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def tp(self) -> int:
        return self.parallelism.world_size

    def norm(self, weight: Tensor, eps: float) -> Norm:
        """``weight``: float32."""
        if not self.fused:
            return lambda x: rms_norm(x, weight, eps)
        if self.native:
            return compiled_norm(weight, eps, self.dtype)
        return cpu_norm(weight, eps) if self.on_cpu else gpu_norm(weight, eps, self.dtype)

    def input_norm(self, spec: NormSpec | None, norms: Mapping[str, Tensor]) -> InputNorm:
        """What a layer's first linear reads, of residual and hidden_states."""
        if spec is None:
            return lambda residual, hidden_states: hidden_states
        norm = self.norm(norms[spec.name], spec.eps)
        return lambda residual, hidden_states: norm(residual)

    def linear(self, packed: PackedLinear) -> Linear:
        if self.native:
            from engine.kernels.cpu.native import native_linear  # C++ functions are built if they are used

            return native_linear(packed)
        return packed.apply if self.fused else packed.reference

    def reduced(self, linear: Linear) -> Linear:
        """A linear cut along its input: each rank holds a partial sum."""
        if self.tp == 1:
            return linear
        return lambda x: self.parallelism.all_reduce(linear(x), "tp")


@dataclass(frozen=True, slots=True)
class LoweredHead:
    """The final norm and the vocabulary projection."""

    project: Callable[[Tensor], Tensor]
    """``residual [R, hidden_size] -> logits [R, vocab]`` float32"""
    lm_head: Callable[[Tensor], Tensor]
    """:attr:`project` without the norm: for rows that are normed already."""
    project_greedy: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    """:attr:`project`, and each row's most likely token, int64 ``[R]``: the lowest id among equals, -1 where the logits
    are broken. ``None`` where no kernel finds it on the way."""
