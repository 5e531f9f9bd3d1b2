"""An EAGLE3 head with random weights, in the layout and the sizes of the public one for Llama-3.1-8B: one layer on
three hidden states of the model, twice as wide at its input, and a vocabulary of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from gpu_check.shapes import EPS, ROPE_THETA, Shape

DRAFT_VOCAB = 32000


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The head of a model of some shape."""

    target: Shape

    @property
    def draft_vocab(self) -> int:
        return min(DRAFT_VOCAB, self.target.vocab_size // 4)

    @property
    def fc(self) -> int:
        """Weights of what makes one hidden state of three."""
        return 3 * self.target.hidden_size**2

    @property
    def qkv(self) -> int:
        """Weights of the layer's queries, keys and values, which are made of twice the hidden size."""
        shape = self.target
        return 2 * shape.hidden_size * (shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim

    @property
    def layer(self) -> int:
        """Weights of the layer's products."""
        shape = self.target
        return self.qkv + shape.hidden_size * (shape.num_attention_heads * shape.head_dim + 3 * shape.intermediate_size)

    @property
    def lm_head(self) -> int:
        return self.draft_vocab * self.target.hidden_size

    @property
    def aux_layers(self) -> tuple[int, int, int]:
        """The model's layers whose output is taken: an early one, one in the middle, a late one."""
        layers = self.target.num_hidden_layers
        return 1, max(0, layers // 2 - 1), max(0, layers - 4)


def write_head(shape: HeadShape, folder: Path, dtype: torch.dtype, device: str) -> None:
    """``config.json`` and ``model.safetensors`` as the paper's authors name things (arXiv:2503.01840)."""
    folder.mkdir(parents=True)
    target = shape.target
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": target.hidden_size, "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads, "head_dim": target.head_dim,
        "intermediate_size": target.intermediate_size, "vocab_size": target.vocab_size,
        "draft_vocab_size": shape.draft_vocab, "rms_norm_eps": EPS, "rope_theta": ROPE_THETA,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers)},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    found = {name: tensor.cpu() for name, tensor in tensors(shape, dtype, device).items()}
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


def tensors(shape: HeadShape, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Normal weights, scaled so that activations keep their size; every so many-th token of the model's vocabulary."""
    generator, target, vocab = torch.Generator(device).manual_seed(1), shape.target, shape.draft_vocab
    hidden, ffn = target.hidden_size, target.intermediate_size
    q, kv = target.num_attention_heads * target.head_dim, target.num_key_value_heads * target.head_dim
    sizes = {
        "fc": (hidden, 3 * hidden), "midlayer.self_attn.q_proj": (q, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv, 2 * hidden), "midlayer.self_attn.v_proj": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, q), "midlayer.mlp.gate_proj": (ffn, hidden),
        "midlayer.mlp.up_proj": (ffn, hidden), "midlayer.mlp.down_proj": (hidden, ffn), "lm_head": (vocab, hidden),
    }  # fmt: skip
    found: dict[str, Tensor] = {}
    for name, (rows, columns) in sizes.items():
        values = torch.randn(rows, columns, generator=generator, device=device)
        found[f"{name}.weight"] = values.mul_(float(columns) ** -0.5).to(dtype)
    for name in ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm"):
        found[f"{name}.weight"] = torch.ones(hidden, dtype=dtype, device=device)
    apart = target.vocab_size // vocab
    found["d2t"] = torch.arange(vocab, device=device) * (apart - 1)
    ids = torch.arange(target.vocab_size, device=device)
    found["t2d"] = (ids % apart == 0) & (ids < apart * vocab)
    return found
