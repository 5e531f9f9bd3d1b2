"""The normed embedding beside the normed hidden state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.torch.norms import rms_norm
from engine.kernels.triton.joined_norms import joined_norms
from engine.kernels.triton.launch import Launch, NormWeight

EPS = (1e-6, 1e-3)


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def joined(tokens: Tensor | None, table: Tensor, x: Tensor, weights: Tensor, eps: tuple[float, float]) -> list[Tensor]:
    """What the kernel makes where it runs, back on the CPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    of_table, of_x = (NormWeight(weight.to(device), each) for weight, each in zip(weights, eps, strict=True))
    ids = None if tokens is None else tokens.to(device)
    made = joined_norms(ids, table.to(device), x.to(device), (of_table, of_x), Launch.on(device))
    return [one.cpu() for one in made]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2**-7), ("float16", 2**-10)])
@pytest.mark.parametrize("size", [64, 96, 2100])
def test_the_normed_embedding_is_beside_the_normed_hidden_state(size: int, dtype: str, tolerance: float) -> None:
    table, x = (random(*shape).to(getattr(torch, dtype)) for shape in ((9, size), (3, size)))
    weights, tokens = random(2, size), torch.tensor([8, 0, 4])
    together, normed = joined(tokens, table, x, weights, EPS)
    wants = [rms_norm(rows.float(), *how) for rows, *how in zip((table[tokens], x), weights, EPS, strict=True)]
    assert together.shape == (3, 2 * size) and together.dtype == x.dtype
    assert torch.allclose(together.float(), torch.cat(wants, dim=1), rtol=tolerance, atol=1e-6)
    assert torch.equal(together[:, size:], normed) and normed.is_contiguous()


@pytest.mark.parametrize("dtype", ["float32", "float16"])  # the interpreter cuts bfloat16 where a GPU rounds
def test_what_is_normed_is_rounded_once_as_in_torch(dtype: str) -> None:
    """Of rows whose rms is a power of two: the product with the weight is all that is rounded."""
    signs = random(7, 100).sign().to(getattr(torch, dtype))
    weights = random(2, 100)
    together, normed = joined(torch.arange(3), 2 * signs[:4], 4 * signs[4:], weights, (0.0, 0.0))
    of_table, of_x = rms_norm(2 * signs[:3], weights[0], 0.0), rms_norm(4 * signs[4:], weights[1], 0.0)
    assert torch.equal(together, torch.cat((of_table, of_x), dim=1)) and torch.equal(normed, of_x)


def test_without_tokens_the_rows_are_the_embeddings_and_hidden_states_may_lie_apart() -> None:
    rows, apart, weights = random(3, 64), random(3, 100)[:, :64], random(2, 64)
    together, _ = joined(None, rows, apart, weights, EPS)
    same, _ = joined(torch.tensor([0, 1, 2]), rows, apart.contiguous(), weights, EPS)
    assert torch.equal(together, same)


def test_nothing_outside_of_the_table_is_read() -> None:
    poisoned = torch.full((6, 64), float("nan"))
    poisoned[2:4] = 1.0
    together, _ = joined(torch.tensor([-5, 7]), poisoned[2:4], torch.ones(2, 64), torch.ones(2, 64), EPS)
    assert bool(together.isfinite().all())
