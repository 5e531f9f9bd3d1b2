"""Tiny random Llama checkpoints for tests, written without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 120,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def weights(seed: int = 0, layers: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.15

    tensors = {
        "model.embed_tokens.weight": matrix(120, 64),
        "model.norm.weight": 1.0 + matrix(64),
        "lm_head.weight": matrix(120, 64),
    }
    for i in range(layers):
        name = f"model.layers.{i}"
        tensors |= {
            f"{name}.input_layernorm.weight": 1.0 + matrix(64),
            f"{name}.post_attention_layernorm.weight": 1.0 + matrix(64),
            f"{name}.self_attn.q_proj.weight": matrix(64, 64),
            f"{name}.self_attn.k_proj.weight": matrix(32, 64),
            f"{name}.self_attn.v_proj.weight": matrix(32, 64),
            f"{name}.self_attn.o_proj.weight": matrix(64, 64),
            f"{name}.mlp.gate_proj.weight": matrix(96, 64),
            f"{name}.mlp.up_proj.weight": matrix(96, 64),
            f"{name}.mlp.down_proj.weight": matrix(64, 96),
        }
    return tensors


def write(folder: Path, tensors: dict[str, Tensor] | None = None, layers: int = 3, **options: Any) -> Path:
    """``tensors``: of so many layers; by default :func:`weights`."""
    config = CONFIG | {"num_hidden_layers": layers} | options
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])  # Qwen3 would have 128
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights(layers=layers) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def variant(folder: Path, family: str, tied: bool, stored: torch.dtype) -> Path:
    """A tiny checkpoint of a Llama-like family, with the tensors that family has."""
    tensors = weights()
    if tied:
        del tensors["lm_head.weight"]
    for i in range(3):
        name = f"model.layers.{i}.self_attn"
        if family == "Qwen2ForCausalLM":
            tensors |= {f"{name}.{part}_proj.bias": torch.ones(64 if part == "q" else 32) for part in "qkv"}
        if family == "Qwen3ForCausalLM":
            tensors |= {f"{name}.{part}_norm.weight": torch.ones(16) for part in "qk"}
    kept = {name: tensor.to(stored) for name, tensor in tensors.items()}
    return write(folder, kept, architectures=[family], tie_word_embeddings=tied)
