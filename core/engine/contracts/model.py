"""Facts about a checkpoint and a device, as plain data read without loading a weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """Rotary position embedding of a checkpoint (RoFormer, arXiv 2104.09864).

    ``kind`` is ``default``, ``linear``, ``dynamic``, ``yarn``, ``llama3`` or ``longrope``; ``params`` holds that
    kind's own numbers under their ``rope_scaling``/``rope_parameters`` names.
    """

    theta: float = 10000.0
    kind: str = "default"
    rotary_dim: int | None = None
    """Rotated part of each head; ``None`` means all of ``head_dim``."""
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A checkpoint's ``config.json`` in the engine's own words."""

    path: str
    """Local directory in Hugging Face layout."""
    name: str
    """Name under which the model is served."""
    architecture: str
    """First entry of ``architectures``, for example ``LlamaForCausalLM``."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope: RopeFacts
    tie_embeddings: bool
    hidden_act: str
    sliding_window: int | None
    layer_windows: tuple[int | None, ...]
    """Attention window of each layer in tokens; ``None`` means full attention. Length ``num_layers``."""
    dtype: str
    """Dtype the checkpoint states: ``float32``, ``bfloat16`` or ``float16``."""
    quantization: Mapping[str, Any] | None
    """``quantization_config`` of the checkpoint, if any."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    raw: Mapping[str, Any]
    """The whole ``config.json``, for what only one architecture understands."""


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
    no_cxx: str = ""
    """Why there is no ``cxx``, where it was looked for."""
