"""Tiny checkpoints of three families, and what they are lowered on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.kernels import tiny

LAYERS = 2
FAMILIES = ("llama", "llama_biased", "qwen2", "qwen3")


def write(folder: Path, family: str) -> Path:
    """A checkpoint of ``tests/kernels/tiny.py`` with the biases and head norms of ``family``."""
    tensors = tiny.weights(layers=LAYERS)
    generator = torch.Generator().manual_seed(3)

    def vector(size: int) -> Tensor:
        return torch.randn(size, generator=generator) * 0.2

    for i in range(LAYERS):
        name = f"model.layers.{i}"
        attention = f"{name}.self_attn"
        if family in ("qwen2", "llama_biased"):
            tensors |= {
                f"{attention}.q_proj.bias": vector(64),
                f"{attention}.k_proj.bias": vector(32),
                f"{attention}.v_proj.bias": vector(32),
            }
        if family == "llama_biased":
            tensors |= {
                f"{attention}.o_proj.bias": vector(64),
                f"{name}.mlp.gate_proj.bias": vector(96),
                f"{name}.mlp.up_proj.bias": vector(96),
                f"{name}.mlp.down_proj.bias": vector(64),
            }
        if family == "qwen3":
            tensors |= {f"{attention}.{part}_norm.weight": 1.0 + vector(16) for part in "qk"}
    return tiny.write(folder, tensors, LAYERS, **options(family))


def options(family: str) -> dict[str, Any]:
    if family == "llama":
        return {}
    if family == "llama_biased":
        return {"attention_bias": True, "mlp_bias": True}
    name = family.capitalize()
    return {"architectures": [f"{name}ForCausalLM"], "model_type": family, "head_dim": 16}
