"""Facts about a checkpoint and a device, as plain data read without loading a weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.contracts.ops import Attention


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A checkpoint's ``config.json``, as far as it is the same for every family. Everything else in it is read by the
    architecture plugin."""

    path: str
    """Local directory in Hugging Face layout."""
    name: str
    """Name under which the model is served."""
    architecture: str
    """First entry of ``architectures``."""
    dtype: str
    """Dtype the checkpoint states: ``float32``, ``bfloat16`` or ``float16``."""
    quantization: Mapping[str, Any] | None
    """``quantization_config`` of the checkpoint, if any."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    raw: Mapping[str, Any]
    """The whole ``config.json``; of a model with a part for text (``text_config``), that part."""


@dataclass(frozen=True, slots=True)
class ModelFacts(ModelConfig):
    """And what follows from the graph that the architecture plugin recorded."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    max_position: int
    """Most tokens of a sequence."""
    tie_embeddings: bool
    attentions: tuple[Attention, ...]
    """Those that differ, in order of appearance."""
    why_no_longer: str = ""
    """Why a sequence may have no more tokens than ``max_position``, where the checkpoint promises more."""

    @property
    def num_heads(self) -> int:
        return self.attentions[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attentions[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attentions[0].head_dim


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device as seen before torch is imported."""

    kind: Literal["cpu", "cuda"]
    name: str = ""
    capability: tuple[int, int] | None = None
    """CUDA compute capability, for example ``(9, 0)``; ``None`` on a CPU."""
    memory_bytes: int = 0
    """Total device memory (CPU: physical memory)."""
    features: frozenset[str] = frozenset()
    """CPU flags that matter to kernels: ``avx2``, ``avx512f``, ``avx512_bf16``, ``amx_bf16``, ``amx_int8`` ..., and
    ``cxx``: there is a C++ compiler to build kernels with (:mod:`engine.native`)."""
    count: int = 1
    """How many such devices this process sees."""
    no_cxx: str = ""
    """Why there is no ``cxx``, where it was looked for."""
