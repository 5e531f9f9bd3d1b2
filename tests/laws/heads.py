"""Random heads for a model of any size, in the layouts the drafters read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.contracts.model import ModelFacts

HEADS, KV_HEADS, DIM, MLP, DRAFT_VOCAB = 4, 2, 16, 80, 60


def write_eagle3(folder: Path, target: ModelFacts) -> Path:
    """One layer on three hidden states, predicting every second token."""
    hidden, matrix = target.hidden_size, _Random(21)
    tensors = {
        "fc.weight": matrix(hidden, 3 * hidden),
        "norm.weight": 1 + matrix(hidden),
        "lm_head.weight": matrix(DRAFT_VOCAB, hidden),
        "d2t": torch.arange(DRAFT_VOCAB),
        "t2d": (torch.arange(target.vocab_size) % 2 == 0) & (torch.arange(target.vocab_size) < 2 * DRAFT_VOCAB),
        "midlayer.hidden_norm.weight": 1 + matrix(hidden),
        **_layer("midlayer", hidden, 2 * hidden, matrix),
    }
    own = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": DRAFT_VOCAB}
    return _write(folder, tensors, target, num_hidden_layers=1, **own)


def write_parallel_block(folder: Path, target: ModelFacts) -> Path:
    """Two layers on two hidden states, blocks of six."""
    hidden, matrix = target.hidden_size, _Random(22)
    tensors = {
        "fc.weight": matrix(hidden, 2 * hidden),
        "hidden_norm.weight": 1 + matrix(hidden),
        "norm.weight": 1 + matrix(hidden),
    }
    for i in range(2):
        tensors |= _layer(f"layers.{i}", hidden, hidden, matrix)
        tensors |= {f"layers.{i}.self_attn.{part}_norm.weight": 1 + matrix(DIM) for part in "qk"}
    block = {"mask_token_id": target.vocab_size - 1, "target_layer_ids": [0, target.num_layers - 1]}
    own = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 6, "dflash_config": block}
    return _write(folder, tensors, target, num_hidden_layers=2, **own)


class _Random:
    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return 0.2 * torch.randn(*shape, generator=self._generator)


def _layer(name: str, hidden: int, wide: int, matrix: _Random) -> dict[str, Tensor]:
    shapes = {
        "self_attn.q_proj": (HEADS * DIM, wide),
        "self_attn.k_proj": (KV_HEADS * DIM, wide),
        "self_attn.v_proj": (KV_HEADS * DIM, wide),
        "self_attn.o_proj": (hidden, HEADS * DIM),
        "mlp.gate_proj": (MLP, hidden),
        "mlp.up_proj": (MLP, hidden),
        "mlp.down_proj": (hidden, MLP),
    }
    norms = {f"{name}.{part}_layernorm.weight": 1 + matrix(hidden) for part in ("input", "post_attention")}
    return norms | {f"{name}.{part}.weight": matrix(*shape) for part, shape in shapes.items()}


def _write(folder: Path, tensors: dict[str, Tensor], target: ModelFacts, **config: Any) -> Path:
    sizes = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "intermediate_size": MLP,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(sizes | config))
    save_file(tensors, folder / "model.safetensors")
    return folder
