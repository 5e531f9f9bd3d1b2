"""The guard against waiting for a device sees what waits, and lets pass what does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.testing.no_sync import NoSync, Synchronises


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: int(x.sum()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
        lambda x: bool((x == x).all()),
        lambda x: x.masked_select(x > 0),
        lambda x: x.tolist(),
        lambda x: x.long().tolist(),
        lambda x: x[0].item(),
        lambda x: x.numpy(),
        lambda x: float(x[0]),
        lambda x: [1, 2, 3][x.long()[0]],
        lambda x: 1.0 in x,
        lambda x: x.cpu(),
    ],
)
def test_the_guard_sees_what_waits(wait: Callable[[Tensor], object]) -> None:
    with pytest.raises(Synchronises), NoSync():
        wait(torch.ones(3))


def test_what_the_guard_refuses_is_allowed_again_after_it() -> None:
    with pytest.raises(Synchronises), NoSync(), NoSync():
        torch.ones(3).tolist()
    assert torch.ones(2).tolist() == [1.0, 1.0] and bool(torch.ones(())) and int(torch.ones(())) == 1


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.max(dim=-1),
        lambda x: x[torch.zeros(2, dtype=torch.int64)],
        lambda x: torch.where(x > 0, x, -1.0),
        lambda x: x.index_select(0, torch.zeros(2, dtype=torch.int64)),
    ],
)
def test_the_guard_lets_pass_what_stays_on_the_device(work: Callable[[Tensor], object]) -> None:
    with NoSync():
        work(torch.ones(3))
