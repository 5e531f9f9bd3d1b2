"""The kernel that makes a step's cosines and sines makes those of torch."""

from __future__ import annotations

import pytest
import torch

from engine.contracts.ops import RopeFacts
from engine.kernels.torch.rope import Rotary
from engine.kernels.triton.rotation import rotation_tables

YARN = {"factor": 8.0, "original_max_position_embeddings": 4096, "max_position_embeddings": 32768}
FACTS = {"all": RopeFacts(5e5), "part": RopeFacts(rotary_dim=36), "yarn": RopeFacts(kind="yarn", params=YARN)}


@pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS)
@pytest.mark.parametrize("count", [1, 37])
def test_cosines_and_sines_are_those_of_torch(device: str, facts: RopeFacts, count: int) -> None:
    """Of positions in any order, far ones among them, that lie apart in memory."""
    positions = torch.randint(0, 131072, (2 * count,), generator=torch.Generator().manual_seed(count)).to(device)[::2]
    rotary = Rotary(facts, 128, 131072, device)
    assert (rotary.amplitude == 1.0) == (facts.kind != "yarn")
    for got, want in zip(rotation_tables(rotary, positions), rotary.cos_sin(positions, torch.float32), strict=True):
        assert got.shape == want.shape and got.is_contiguous()
        assert float((got - want).abs().max()) <= 2e-7 * rotary.amplitude
