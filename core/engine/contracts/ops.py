"""Typed operations: the language in which an architecture describes a model.

An architecture says *what* a layer computes and how its tensors are named in the checkpoint; the core lowers each
op to kernels (fused where a template matches, else the chain of reference ops). The residual stream is
``[num_tokens, hidden_size]``; every op reads it or adds to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.contracts.model import RopeFacts


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One projection as the checkpoint stores it: ``{name}.weight`` is ``[out_features, in_features]``."""

    name: str
    out_features: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One multiplication; several parts share their input and are fused along the output."""

    parts: tuple[LinearPart, ...]
    in_features: int
    shard: Literal["out", "in", "none"] = "none"
    """Axis that tensor parallelism cuts: ``out`` for q/k/v, gate/up and the head; ``in`` for o and down."""
    kind: Literal["body", "gate_up", "head"] = "body"
    """``gate_up``: two parts of equal size, gate and up, of which the op computes ``act(gate) * up``."""

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMSNorm (arXiv 1910.07467): ``x / rms(x) * weight``, in float32, then cast."""

    name: str
    eps: float


@dataclass(frozen=True, slots=True)
class Embed:
    """Token embedding ``[vocab, hidden_size]``."""

    name: str
    vocab_size: int
    hidden_size: int


@dataclass(frozen=True, slots=True)
class NormQKVRopeWrite:
    """Norm, q/k/v projection, optional per-head norm of q and k, rotation, and the write into the KV cache.

    ``norm=None``: the layer is handed its normed input as the hidden states, and reads nothing of the residual stream.
    """

    norm: NormSpec | None
    qkv: LinearSpec
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeFacts | None
    q_norm: NormSpec | None = None
    k_norm: NormSpec | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention over the paged cache; ``window`` in tokens, ``scale`` multiplies q·k."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True)
class OutResidual:
    """Output projection of attention, added to the residual stream."""

    out: LinearSpec


@dataclass(frozen=True, slots=True)
class NormGateUpAct:
    """Norm, gate and up projections, ``act(gate) * up``."""

    norm: NormSpec
    gate_up: LinearSpec
    act: Literal["silu", "gelu_tanh"] = "silu"


@dataclass(frozen=True, slots=True)
class DownResidual:
    """Down projection, added to the residual stream."""

    down: LinearSpec


@dataclass(frozen=True, slots=True)
class LMHead:
    """Final norm and vocabulary projection. ``tied``: the weight is the embedding's."""

    norm: NormSpec
    head: LinearSpec
    tied: bool


LayerOp = NormQKVRopeWrite | Attention | OutResidual | NormGateUpAct | DownResidual


@dataclass(frozen=True, slots=True)
class ModelOps:
    """A whole model: ``embed``, then each layer's ops in order, then ``head``."""

    embed: Embed
    layers: tuple[tuple[LayerOp, ...], ...]
    head: LMHead
