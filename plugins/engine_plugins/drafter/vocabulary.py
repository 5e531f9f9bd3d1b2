"""The tokens that a head with a vocabulary of its own can draft."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.contracts.drafter import DraftWeights


def target_ids(weights: DraftWeights, draft_vocab: int, target_vocab: int, path: str) -> Tensor:
    """The target's id of each draft id, int64 ``[draft_vocab]``, from ``d2t``, which has the differences of the two.

    Raises ``ValueError`` for ids that the target has not.
    """
    offsets = weights.tensor("d2t", (draft_vocab,)).to(torch.int64)
    found = offsets + torch.arange(draft_vocab)
    if int(found.min()) < 0 or int(found.max()) >= target_vocab:
        raise ValueError(
            f"drafter.path={path}: d2t maps to tokens {int(found.min())} to {int(found.max())}, "
            f"expected 0 to {target_vocab - 1}"
        )
    return found
