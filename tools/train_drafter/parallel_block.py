"""A head that fills a whole block of masks in one pass (after DFlash, z-lab, 2026), in the layout of its checkpoints.

Every layer attends to the text, of which it knows ``hidden_norm(fc(aux))`` of the target, and to all of the block
``[newest token, MASK, MASK, ...]``, ahead and behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tools.train_drafter.chains import DraftHead, HeadSizes
from tools.train_drafter.features import Batch
from tools.train_drafter.parts import Layer, RMSNorm, attend
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes(HeadSizes):
    """Names as in ``config.json``."""

    num_hidden_layers: int
    block_size: int
    """Tokens of a block, the newest one included."""
    mask_token: int
    """Any token that texts do not have."""

    def config(self) -> dict[str, Any]:
        """``config.json``."""
        return self.llama_config(
            "DFlashDraftModel",
            "qwen3",
            draft_vocab_size=self.draft_vocab_size,
            num_hidden_layers=self.num_hidden_layers,
            block_size=self.block_size,
            dflash_config={"mask_token_id": self.mask_token, "target_layer_ids": self.tapped_outputs},
            tie_word_embeddings=False,
        )


@dataclass(frozen=True, slots=True)
class _Block:
    """Where the blocks of a batch are: ``A`` a row, ``W`` tokens each, one block after the other."""

    size: int
    positions: Tensor
    """int64 ``[rows, A * W]``"""
    text: Tensor
    """int64 ``[rows, T]``"""
    visible: Tensor
    """bool ``[rows, A * W, T]``: the text before the block."""

    def of_all(self, x: Tensor, position: int) -> Tensor:
        """What the token at ``position`` of a block has, for every token of the block: ``[rows, A * W, ...]``."""
        blocks = x.unflatten(1, (-1, self.size))
        return blocks[:, :, position : position + 1].expand_as(blocks).flatten(1, 2)


class _BlockLayer(Layer):
    def forward(self, x: Tensor, block: _Block, text: Tensor) -> Tensor:
        """``x [rows, A * W, hidden]``; ``text [rows, T, hidden]``, what the head knows of it."""
        normed = self.input_layernorm(x)
        k, v = self.self_attn.keys(normed, block.positions)
        own = [(block.of_all(k, position), block.of_all(v, position)) for position in range(block.size)]
        shared = self.self_attn.keys(text, block.text)
        found = attend(self.self_attn.queries(normed, block.positions), *shared, block.visible, own)
        return self.output(x, found)


class ParallelBlock(DraftHead):
    """See :class:`DraftHead`."""

    def __init__(self, sizes: BlockSizes, draft_vocab: Tensor, embedding: Tensor) -> None:
        super().__init__(draft_vocab, embedding)
        self.sizes = sizes
        self.fc = nn.Linear(len(sizes.aux_layers) * sizes.hidden_size, sizes.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.layers = nn.ModuleList(_BlockLayer(sizes, normed_heads=True) for _ in range(sizes.num_hidden_layers))
        self.norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.lm_head = nn.Linear(sizes.hidden_size, sizes.draft_vocab_size, bias=False)

    @torch.no_grad()
    def start_from(self, head_weight: Tensor) -> None:
        """Take the target's vocabulary projection, float32 ``[vocab_size, hidden_size]``."""
        self.lm_head.weight.copy_(head_weight[self.draft_vocab])

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))  # type: ignore[no-any-return]


def filled(head: ParallelBlock, batch: Batch) -> list[Tensor]:
    """Draft logits ``[rows, A, draft_vocab]`` of each mask of a block.

    Column ``a`` is a block whose newest token is at position ``starts[a] + 1``; of the text before that, the target's
    hidden states are known. Mask ``i`` (from 0) says what is at position ``starts[a] + 2 + i``.
    """
    ids, starts, size = batch.ids, batch.starts, head.sizes.block_size
    rows, length = torch.arange(len(ids), device=ids.device)[:, None], ids.shape[1]
    text = head.hidden_norm(head.fc(batch.aux_layers.to(head.fc.weight.dtype)))
    tokens = torch.full((*starts.shape, size), head.sizes.mask_token, device=ids.device)
    tokens[:, :, 0] = ids[rows, (starts + 1).clamp(max=length - 1)]
    positions = starts[:, :, None] + 1 + torch.arange(size, device=ids.device)
    every = torch.arange(length, device=ids.device).expand(len(ids), -1)
    visible = (every[:, None, :] <= starts[:, :, None]).repeat_interleave(size, dim=1)
    block = _Block(size, positions.flatten(1), every, visible)
    x = head.embed(tokens.flatten(1))
    for layer in head.layers:
        x = layer(x, block, text)
    logits = head.logits(x.unflatten(1, (-1, size))[:, :, 1:])
    return list(logits.unbind(dim=2))
