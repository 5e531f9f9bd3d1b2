"""A small Llama with the target's tokenizer, taught the target's distribution (distillation, arXiv:1503.02531)."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tools.train_drafter.features import Batch
from tools.train_drafter.parts import Layer, RMSNorm, Sizes, attend, shifted
from torch import Tensor, nn

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelSizes(Sizes):
    """Names as in ``config.json``."""

    num_hidden_layers: int

    def config(self, target: dict[str, Any]) -> dict[str, Any]:
        """``config.json`` of a Hugging Face Llama; ``target``: the target's, for its special tokens."""
        special: dict[str, Any] = {
            key: target[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in target
        }
        return self.llama_config(
            "LlamaForCausalLM",
            "llama",
            num_hidden_layers=self.num_hidden_layers,
            tie_word_embeddings=True,
            **special,
        )


class DraftModel(nn.Module):
    """Parameters are named as in a Hugging Face checkpoint, without ``model.``; embeddings are tied."""

    def __init__(self, sizes: DraftModelSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.num_hidden_layers))
        self.norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                adds = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 1 / math.sqrt(2 * sizes.num_hidden_layers) if adds else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    @torch.no_grad()
    def start_from(self, embedding: Tensor) -> None:
        """Take the principal components of the target's embedding, float32 ``[vocab_size, any]``, for one's own."""
        size = min(self.sizes.hidden_size, *embedding.shape)
        left, scales, _ = torch.linalg.svd(embedding.cpu(), full_matrices=False)
        self.embed_tokens.weight[:, :size] = left[:, :size] * scales[:size]

    def hidden(self, ids: Tensor) -> Tensor:
        """Normed, ``[rows, T, hidden]``, of ``ids [rows, T]``."""
        positions = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
        visible = positions[:, None, :] <= positions[:, :, None]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            normed, attention = layer.input_layernorm(x), layer.self_attn
            keys, values = attention.keys(normed, positions)
            x = layer.output(x, attend(attention.queries(normed, positions), keys, values, visible))
        return self.norm(x)  # type: ignore[no-any-return]

    def answers(self, batch: Batch) -> Tensor:
        """Logits ``[rows, A, vocab]`` of what follows each position of :attr:`Batch.starts`."""
        rows = torch.arange(len(batch.ids), device=batch.ids.device)[:, None]
        return F.linear(self.hidden(batch.ids)[rows, batch.starts], self.embed_tokens.weight)


def distillation_loss(model: DraftModel, batch: Batch) -> Tensor:
    """Mean cross entropy to the target's distribution over the answers."""
    likely = model.answers(batch)[batch.real].float().log_softmax(dim=-1).gather(-1, batch.choices[batch.real])
    wanted = batch.probabilities[batch.real]
    wanted = wanted / wanted.sum(dim=-1, keepdim=True)
    return -(wanted * likely).sum(dim=-1).mean()


def matches(model: DraftModel, batch: Batch, steps: int) -> tuple[Tensor, Tensor]:
    """See :data:`tools.train_drafter.acceptance.Matches`. A chain's step ``i`` sees the answer up to there, which is
    what it drafted itself where all its steps before were right."""
    right = model.answers(batch).argmax(dim=-1) == batch.choices[..., 0]
    found, where = [], []
    for step in range(1, steps + 1):
        found.append(shifted(right, step))
        where.append(shifted(batch.real, step))
    return torch.stack(found), torch.stack(where)


def checkpoint(model: DraftModel) -> dict[str, Tensor]:
    """The tensors to save."""
    state = model.state_dict().items()
    return {f"model.{name}": tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in state}


def copy_tokenizer(target: Path, out: Path) -> None:
    """What shows a server that both models mean the same by a token."""
    for pattern in TOKENIZER_FILES:
        for file in target.glob(pattern):
            shutil.copyfile(file, out / file.name)


def target_config(target: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((target / "config.json").read_text(encoding="utf-8"))
    return found
