"""What stands in for CUDA graphs in the tests freezes what they freeze, and refuses what they cannot hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.testing.no_sync import Synchronises

from .frozen import FrozenGraphs


def test_a_replay_computes_from_what_is_in_memory_now() -> None:
    x, out = torch.arange(6.0).view(2, 3), torch.zeros(3)

    def step() -> None:
        rows = x.reshape(3, 2).transpose(0, 1)  # a view
        out.copy_(rows.contiguous().sum(dim=0) + rows.T.reshape(-1)[:3])  # and copies

    replay = FrozenGraphs()(step)
    for _ in range(3):
        x.copy_(torch.randn(2, 3))
        step()
        wanted = out.clone()
        out.zero_()
        replay()
        assert torch.equal(out, wanted)


def test_python_and_its_numbers_stay_as_they_were() -> None:
    state, out = {"add": 1}, torch.zeros(2)
    x = {"now": torch.ones(2)}

    def step() -> None:
        out.copy_(x["now"] + state["add"])
        state["add"] += 1

    replay = FrozenGraphs()(step)
    x["now"] = torch.full((2,), 100.0)
    replay()
    assert out.tolist() == [4.0, 4.0], "the third call is what was captured, on the tensor of then"


def test_memory_that_a_replay_does_not_write_holds_nothing() -> None:
    kept: list[Tensor] = [torch.zeros(3)]
    out, half = torch.zeros(3), torch.zeros(3)

    def step() -> None:
        out.copy_(kept[0])
        kept[0] = torch.ones(3) + 1
        buffer = torch.empty(3)
        buffer[:2].fill_(5.0)
        half.copy_(buffer)

    replay = FrozenGraphs()(step)
    replay()
    assert out.tolist() == [2.0] * 3, "what an earlier call made is not the recording's"
    assert half.tolist()[:2] == [5.0, 5.0] and bool(half[2].isnan())


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.max().item(), lambda x: x.tolist(), lambda x: bool(x[0] > 0), lambda x: x[x > 0],
        lambda x: torch.tensor([1.0]), lambda x: x.numpy(), lambda x: x.pin_memory(), lambda x: x.nonzero(),
    ],
)  # fmt: skip
def test_what_waits_or_brings_host_values_is_refused(ask: Callable[[Tensor], object]) -> None:
    x, calls = torch.ones(3), []

    def step() -> None:
        if len(calls) == 2:
            ask(x)
        calls.append(x + 1)

    with pytest.raises(Synchronises):
        FrozenGraphs()(step)
