"""What heads with a vocabulary of their own have in common: its ids, the loss of drafts one after the other, and how
many of them the target says, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tools.train_drafter.features import Batch
from tools.train_drafter.parts import Sizes, shifted
from torch import Tensor, nn

STEP_WEIGHT = 0.8
"""Of a step, relative to the step before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSizes(Sizes):
    """What every head has."""

    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    """Residuals entering these layers of the target, ascending."""

    @property
    def tapped_outputs(self) -> list[int]:
        """As ``config.json`` has them: a layer's id there means its output, the residual entering the next."""
        return [aux_layer - 1 for aux_layer in self.aux_layers]


class DraftHead(nn.Module):
    """A head that reads hidden states of the target, uses its embedding, and can draft some of its tokens only. The
    names of parameters and buffers are those of the checkpoint."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, draft_vocab: Tensor, embedding: Tensor) -> None:
        """``draft_vocab``: int64, the target's ids that can be drafted, ascending. ``embedding``: the target's, float32
        ``[vocab_size, hidden_size]``; it stays as it is and is no part of the checkpoint."""
        super().__init__()
        draftable = torch.zeros(len(embedding), dtype=torch.bool)
        draftable[draft_vocab] = True
        self.register_buffer("d2t", draft_vocab - torch.arange(len(draft_vocab)))
        self.register_buffer("t2d", draftable)
        self.register_buffer("_embedding", embedding, persistent=False)
        self.register_buffer("_to_draft", draftable.cumsum(0) - 1, persistent=False)

    @property
    def draft_vocab(self) -> Tensor:
        """The target's id of each draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._buffers["_embedding"])  # type: ignore[arg-type]

    def to_draft(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Draft ids of the target's ids, and which of them there are; the others are 0."""
        known = self.t2d[ids]
        return torch.where(known, self._buffers["_to_draft"][ids], 0), known  # type: ignore[index]


def judged(batch: Batch, step: int) -> Tensor:
    """Chains whose step predicts a token that the target did answer: bool ``[rows, A]``."""
    return shifted(batch.real, step + 1)


def chain_loss(head: DraftHead, batch: Batch, logits: Sequence[Tensor]) -> Tensor:
    """Cross entropy to the target's distribution over the draft vocabulary, where the target's first choice can be
    drafted: the sum over steps, weighted ``STEP_WEIGHT ** step``, of the mean over chains. ``logits``: of each step,
    ``[rows, A, draft_vocab]``; step ``i`` of column ``a`` is about the token at position ``starts[a] + 2 + i``."""
    total = logits[0].new_zeros(())
    ids, known = head.to_draft(batch.choices)
    wanted = batch.probabilities * known
    wanted = wanted / wanted.sum(dim=-1, keepdim=True).clamp(min=1e-9)
    for step, found in enumerate(logits):
        where = judged(batch, step) & shifted(known[..., 0], step + 1)
        if not bool(where.any()):
            continue
        target_ids, target = (shifted(x, step + 1)[where] for x in (ids, wanted))
        likely = found[where].float().log_softmax(dim=-1).gather(-1, target_ids)
        total = total - STEP_WEIGHT**step * (target * likely).sum(dim=-1).mean()
    return total


def matches(head: DraftHead, batch: Batch, logits: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Whether the head's first choice is the target's, and where that is judged: bool ``[steps, rows, A]`` each."""
    right, where = [], []
    for step, found in enumerate(logits):
        drafted = head.draft_vocab[found.argmax(dim=-1)]
        right.append(drafted == shifted(batch.choices[..., 0], step + 1))
        where.append(judged(batch, step))
    return torch.stack(right), torch.stack(where)


def checkpoint(head: DraftHead) -> dict[str, Tensor]:
    """The tensors to save: weights in bfloat16, the vocabulary's two maps as they are."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    return {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items()}
