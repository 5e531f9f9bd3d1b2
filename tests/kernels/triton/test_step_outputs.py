"""The kernel that settles a captured step writes what torch operations would."""

from __future__ import annotations

import pytest
import torch
import triton

from engine.kernels.triton.step_outputs import settle_step
from engine.sampling.verify import accepted_drafts

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
ROWS, WIDTH, NOBODY = 5, 40, 7


@pytest.mark.parametrize("queries", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_accepted_drafts_tokens_and_lengths_are_those_of_torch(queries: int, seed: int) -> None:
    """Two rows are padding, one has broken logits; drafts are right about half the time."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.tensor([3, 0, 5, NOBODY, NOBODY])
    num_drafts = torch.tensor([queries - 1, 0, max(queries - 2, 0), 0, 0])
    starts = torch.randint(0, WIDTH - 8, (ROWS,), generator=random)
    starts[ids == NOBODY] = 0
    chosen = torch.randint(0, 3, (ROWS, queries), generator=random)
    chosen[2, queries // 2] = -1
    token_ids = torch.cat([torch.randint(0, 3, (ROWS, 1), generator=random), chosen[:, :-1]], dim=1)
    wrong = torch.rand(ROWS, queries, generator=random) < 0.3
    token_ids = torch.where(wrong, token_ids + 1, token_ids).clamp(min=0)
    positions = starts[:, None] + torch.arange(queries)
    tokens, computed = torch.full((NOBODY + 1, WIDTH), 9), torch.arange(NOBODY + 1)

    accepted = accepted_drafts(token_ids, chosen, num_drafts)
    want_tokens, want_computed = tokens.clone(), computed.clone()
    want_tokens[ids[:3, None], positions[:3] + 1] = chosen[:3].clamp(min=0)
    want_computed[ids[:3]] = starts[:3] + 1 + accepted[:3]
    want_computed[NOBODY] = 0

    def flat(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten().to(DEVICE)

    kept, found = torch.zeros(ROWS * queries, dtype=torch.int64, device=DEVICE), flat(torch.zeros_like(accepted))
    tokens, computed = tokens.to(DEVICE), computed.to(DEVICE)
    inputs = torch.stack([ids, num_drafts]).to(DEVICE)
    settle_step(inputs, flat(token_ids), flat(positions), flat(chosen), kept, found, tokens, computed, NOBODY)
    assert torch.equal(kept, flat(chosen)) and torch.equal(found[:3].cpu(), accepted[:3])
    assert torch.equal(tokens[:NOBODY].cpu(), want_tokens[:NOBODY]) and torch.equal(computed.cpu(), want_computed)
