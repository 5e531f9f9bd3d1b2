"""True shapes with random weights: speed depends on the sizes of tensors, not on what is in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from make_random_model import tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor

ROPE_THETA, EPS = 500000.0, 1e-5
LAYERS_PER_FILE = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama, under the names of its ``config.json``."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    max_position_embeddings: int = 16384

    @property
    def body(self) -> int:
        """Weights of the layers' products: what every token is multiplied with."""
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return self.num_hidden_layers * self.hidden_size * (2 * q + 2 * kv + 3 * self.intermediate_size)

    @property
    def head(self) -> int:
        return self.hidden_size * self.vocab_size


SHAPES = {
    "1b": Shape(2048, 16, 32, 8, 64, 8192, 128256, True),
    "8b": Shape(4096, 32, 32, 8, 128, 14336, 128256, False),
}
"""Llama-3.2-1B and Llama-3.1-8B."""
TINY = Shape(64, 2, 4, 2, 16, 128, 512, True, 512)
"""For a dry run."""


def shape_of(name: str, dry_run: bool) -> Shape:
    return TINY if dry_run else SHAPES[name]


def folder_of(name: str, scratch: Path) -> Path:
    """Where :func:`write` puts a model of this name."""
    return scratch / f"model-{name}"


def head_folder_of(name: str, scratch: Path) -> Path:
    """Where the EAGLE3 head of this model is put."""
    return scratch / f"head-{name}"


def config(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """``config.json``"""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": EPS,
        "rope_theta": ROPE_THETA, "bos_token_id": 1, "eos_token_id": 2, "attention_bias": False, "mlp_bias": False,
        "torch_dtype": str(dtype).removeprefix("torch."), **asdict(shape),
    }  # fmt: skip


def write(shape: Shape, folder: Path, dtype: torch.dtype, device: str) -> None:
    """A checkpoint in Hugging Face layout, a few layers a file so that the host never holds all of it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(shape, dtype)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    tokenizer(shape.vocab_size).save(str(folder / "tokenizer.json"))
    where: dict[str, str] = {}
    for number, part in enumerate(parts(shape, dtype, device)):
        name = f"model-{number:05d}.safetensors"
        save_file({key: tensor.cpu() for key, tensor in part.items()}, folder / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(part, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def parts(shape: Shape, dtype: torch.dtype, device: str) -> Iterator[dict[str, Tensor]]:
    """Normal weights, scaled so that activations keep their size through the layers."""
    generator = torch.Generator(device).manual_seed(0)
    hidden, ffn = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim

    def linear(rows: int, columns: int) -> Tensor:
        values = torch.randn(rows, columns, generator=generator, device=device)
        return values.mul_(float(columns) ** -0.5).to(dtype)

    def ones() -> Tensor:
        return torch.ones(hidden, dtype=dtype, device=device)

    ends = {
        "model.embed_tokens.weight": linear(shape.vocab_size, hidden),
        "model.norm.weight": ones(),
    }
    yield ends if shape.tie_word_embeddings else {**ends, "lm_head.weight": linear(shape.vocab_size, hidden)}
    for first in range(0, shape.num_hidden_layers, LAYERS_PER_FILE):
        part: dict[str, Tensor] = {}
        for i in range(first, min(first + LAYERS_PER_FILE, shape.num_hidden_layers)):
            layer = f"model.layers.{i}"
            part |= {
                f"{layer}.input_layernorm.weight": ones(),
                f"{layer}.post_attention_layernorm.weight": ones(),
                f"{layer}.self_attn.q_proj.weight": linear(q, hidden),
                f"{layer}.self_attn.k_proj.weight": linear(kv, hidden),
                f"{layer}.self_attn.v_proj.weight": linear(kv, hidden),
                f"{layer}.self_attn.o_proj.weight": linear(hidden, q),
                f"{layer}.mlp.gate_proj.weight": linear(ffn, hidden),
                f"{layer}.mlp.up_proj.weight": linear(ffn, hidden),
                f"{layer}.mlp.down_proj.weight": linear(hidden, ffn),
            }
        yield part


def read(folder: Path, device: str) -> dict[str, Tensor]:
    """All tensors of a checkpoint that :func:`write` made, on the device."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file, device=device)
    return tensors
