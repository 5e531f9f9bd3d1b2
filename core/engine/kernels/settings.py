"""Where and how a model is lowered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionKernel, NativeAttention
from engine.contracts.communicator import Communicator
from engine.contracts.graph import Node
from engine.contracts.kv_format import KVFormat
from engine.contracts.ops import CountExperts, Embed, Experts, HeadLinear, LinearSpec, Norm, Rope, Router
from engine.kernels.context import Call, Greedy
from engine.kernels.linear import PackedLinear
from engine.models.fuse import Fused, Matcher

Kernels = Literal["reference", "torch", "native", "triton"]

MOST_TOKENS = 16
"""Of a step that runs as a program: with more, what Python adds is lost in what the kernels take."""


def stores_as_is(kv_format: KVFormat, dtype: str) -> bool:
    """Whether a cache of this format stores keys and values of ``dtype`` as they are."""
    return kv_format.scale == "none" and kv_format.storage_dtype(dtype) == dtype


def replay_obstacle(kv_format: KVFormat, dtype: str, attention: AttentionKernel) -> str | None:
    """What layers of C++ kernels do besides calling these, so that no step can be a program; ``None``: nothing, as far
    as the plan tells."""
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
    rotations: tuple[Rope, ...]
    """The distinct rotations of the model; their order is that of ``StepContext.rotations``."""
    kernels: Kernels = "torch"
    """What ops are lowered to. ``torch``: torch ops; ``native``: C++ kernels built on this machine (CPU, float32 and
    bfloat16); ``triton``: fused kernels (CUDA, or Triton's interpreter); ``reference``: torch, op by op, for tests and
    for judging a fast path."""
    first_cache: int = 0
    """Where in the engine's cache the caches of the graph begin."""
    collectives: Communicator | None = None
    """By which ranks exchange what they make; ``None``: there is one rank."""

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
        return replay_obstacle(self.kv_format, self.dtype_name, self.attention)

    @property
    def stores_kv_as_is(self) -> bool:
        """Whether the cache stores keys and values as they are."""
        return stores_as_is(self.kv_format, self.dtype_name)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


class Weights(Protocol):
    """What kernels ask for while they are built: tensors of this rank, on the device."""

    def linear(self, spec: LinearSpec, *, tied: bool = False) -> PackedLinear:
        """A linear layer; the same for the same ``spec``."""
        ...

    def norm(self, op: Norm) -> Tensor:
        """What the normed input is multiplied by: float32 ``[size]``, ``op.offset`` added."""
        ...

    def norm_bias(self, op: Norm) -> Tensor | None:
        """float32 ``[size]``"""
        ...

    def experts(self, op: Experts) -> list[tuple[PackedLinear, PackedLinear]]:
        """Gate and up, and down, of each expert."""
        ...

    def stacked_experts(self, op: Experts) -> tuple[PackedLinear, PackedLinear]:
        """The same as two weights, experts one after another: ``[num_experts * 2 * size, in]``, and ``[num_experts *
        out, size]``."""
        ...

    def expert_counts(self, op: CountExperts) -> Tensor:
        """int64 ``[num_experts]``, zeros: the table of the op's layer."""
        ...

    def head_weights(self, op: HeadLinear) -> Tensor:
        """``[num_heads, rows, features]`` in the compute dtype."""
        ...

    def router(self, op: Router) -> tuple[Tensor, Tensor | None]:
        """Weight ``[num_experts, in_features]`` and bias, float32."""
        ...

    def small(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of the checkpoint, whole, in float32."""
        ...

    def embedding(self, op: Embed) -> Tensor:
        """``[vocab_size, size]`` in the compute dtype."""
        ...


@dataclass(frozen=True, slots=True)
class Lowered:
    """A kernel, ready to run."""

    call: Call
    label: str
    """What runs, for the plan."""
    not_native: str | None = "torch computes it"
    """Why a step with this call can be no program of native calls; ``None``: it can."""
    waits: str = ""
    """Why it waits for the device, so that no CUDA graph can hold it; empty: it does not."""
    greedy: Greedy | None = None
    """Of what makes logits: the same, and each row's most likely token, int64 ``[R]``: the lowest id among equals, -1
    where the logits are broken. ``None`` where no kernel finds it on the way."""


Lower = Callable[[Lowering, "Fused[Kernel]", Weights], Lowered]


@dataclass(frozen=True, slots=True)
class Kernel:
    """What a backend offers: a sequence of ops, and how it is computed."""

    match: Matcher
    lower: Lower
    suits: Callable[[Lowering, Any], bool] | None = None
    """Whether it computes what was matched (:attr:`engine.models.fuse.Match.what`)."""


def cache_of(lowering: Lowering, node: Node) -> int:
    """Where in the engine's cache a node writes or reads."""
    assert node.cache is not None
    return lowering.first_cache + node.cache
