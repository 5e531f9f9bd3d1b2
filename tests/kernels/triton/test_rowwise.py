"""The kernels beside the products."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.torch.reference import gated_activation as reference
from engine.kernels.triton import launch
from engine.kernels.triton.launch import Launch, argmax_rows, gated_activation


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2), ("float16", 3e-3)])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (17, 96), (2, 1500)])
def test_gated_rows_equal_the_reference(
    device: str, rows: int, size: int, dtype: str, tolerance: float, act: str
) -> None:
    x = (3.0 * torch.randn(rows, 2 * size, generator=torch.Generator().manual_seed(size))).to(getattr(torch, dtype))
    want = reference(x.float(), act)
    got = gated_activation(x.to(device), act, Launch.on(device))
    assert float((got.cpu().float() - want).abs().max()) <= tolerance * max(1.0, float(want.abs().max()))


def test_extreme_gates_are_exact_limits(device: str) -> None:
    x = torch.tensor([[-1e30, -200.0, 200.0, 2.0, 2.0, 2.0]], device=device)
    for act in ("silu", "gelu_tanh"):
        assert gated_activation(x, act, Launch.on(device)).abs().tolist() == [[0.0, 0.0, 400.0]]


@pytest.mark.parametrize("vocab", [1, 31, 1000])
@pytest.mark.parametrize("chunk", [16, 4096])
def test_the_largest_logit_is_found_across_chunks(
    device: str, vocab: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "CHUNK", chunk)
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab)).round(decimals=1).to(device)
    want = torch.tensor([row.tolist().index(max(row.tolist())) for row in logits])
    assert torch.equal(argmax_rows(logits, Launch.on(device)).cpu(), want)


def test_broken_logits_give_no_token(device: str) -> None:
    logits = torch.zeros(4, 50, device=device)
    logits[0, 7], logits[1, 3], logits[2] = float("nan"), float("inf"), float("-inf")
    logits[3, :20] = float("-inf")
    assert argmax_rows(logits, Launch.on(device)).tolist() == [-1, -1, -1, 20]
