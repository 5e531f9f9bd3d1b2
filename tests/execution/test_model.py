"""The lowered model: fast paths against the reference chain, and what may not change a result."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.execution.lowering import Kernels
from engine.execution.lowering.replay import ReplayedSteps
from engine.execution.model import StepContext
from tests.execution import tiny
from tests.execution.paged_loop import PagedLoop, load
from tests.needs import needs_compiler

TOKENS = [(7 * i + 3) % 120 for i in range(70)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny"))


KERNELS = ["torch", pytest.param("native", marks=needs_compiler)]


@pytest.mark.parametrize("kernels", KERNELS)
def test_fast_ops_equal_the_reference_chain(checkpoint: Path, kernels: Kernels) -> None:
    facts, fast = load(checkpoint, kernels=kernels)
    _, plain = load(checkpoint, kernels="reference")
    want = PagedLoop(facts, plain).logits(TOKENS)
    assert float((PagedLoop(facts, fast).logits(TOKENS) - want).abs().max()) <= 2e-5
    assert float(want.abs().max()) > 2.0


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [("torch", "bfloat16"), ("torch", "float16"), pytest.param("native", "bfloat16", marks=needs_compiler)],
)
def test_fast_ops_in_16_bits_are_as_near_to_float32_as_the_reference_chain(
    checkpoint: Path, kernels: Kernels, dtype: str
) -> None:
    def logits(kernels: Kernels, dtype: str) -> Tensor:
        facts, model = load(checkpoint, dtype, kernels=kernels)
        return PagedLoop(facts, model, dtype).logits(TOKENS)

    exact = logits("reference", "float32")
    rounding = float((logits("reference", dtype) - exact).square().mean().sqrt())
    assert float((logits(kernels, dtype) - exact).square().mean().sqrt()) <= 1.25 * rounding
    assert rounding < 0.05


def test_chunks_give_the_logits_of_the_whole_prompt(checkpoint: Path) -> None:
    facts, model = load(checkpoint)
    loop = PagedLoop(facts, model)
    want = loop.logits(TOKENS)
    sequence = loop.add()
    pieces = [TOKENS[:33], TOKENS[33:34], TOKENS[34:39], TOKENS[39:]]
    got = torch.cat([model.head(loop.step([(sequence, piece)])[0]) for piece in pieces])
    assert float((got - want).abs().max()) <= 2e-5


def test_neighbours_in_the_batch_do_not_change_a_row(checkpoint: Path) -> None:
    facts, model = load(checkpoint)
    loop = PagedLoop(facts, model)
    want = loop.logits(TOKENS)
    first, second, third = loop.add(), loop.add(), loop.add()
    loop.step([(second, TOKENS[5:25])])
    hidden, _ = loop.step([(second, TOKENS[1:4]), (first, TOKENS), (third, TOKENS[:50])])
    assert float((model.head(hidden[3:73]) - want).abs().max()) <= 2e-5


def test_taps_are_the_residual_entering_each_layer(checkpoint: Path) -> None:
    facts, model = load(checkpoint)
    loop = PagedLoop(facts, model)
    hidden, taps = loop.step([(loop.add(), TOKENS)], taps=(3, 0, 2))
    assert torch.equal(taps[0], hidden)
    assert torch.equal(taps[1], model.embed(torch.tensor(TOKENS)))
    assert not torch.equal(taps[2], hidden)


def test_a_cache_rewritten_after_a_rollback_holds_the_new_tokens(checkpoint: Path) -> None:
    facts, model = load(checkpoint)
    loop = PagedLoop(facts, model)
    want = loop.logits(TOKENS)[-1]
    sequence = loop.add()
    loop.step([(sequence, [*TOKENS[:60], 1, 2, 3])])
    loop.lengths[sequence] = 60
    hidden, _ = loop.step([(sequence, TOKENS[60:])])
    assert float((model.head(hidden[-1:])[0] - want).abs().max()) <= 2e-5


def test_logits_are_float32_in_every_dtype(checkpoint: Path) -> None:
    facts, model = load(checkpoint, "bfloat16")
    assert PagedLoop(facts, model, "bfloat16").logits(TOKENS[:3]).dtype == torch.float32


@needs_compiler
@pytest.mark.parametrize("taps", [(), (2, 0, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_replayed_step_equals_the_same_step_op_by_op(checkpoint: Path, dtype: str, taps: tuple[int, ...]) -> None:
    """Of one, three and sixteen tokens, at other positions, in other blocks and for other sequences each time."""
    facts, model = load(checkpoint, dtype, kernels="native")
    assert model.small_steps is not None
    replaying, plain = (PagedLoop(facts, one, dtype) for one in (model, replace(model, small_steps=None)))
    for loop in (replaying, plain):
        for _ in range(4):
            loop.step([(loop.add(), TOKENS[:40])])
    for round_number in range(3):
        for rows in ([(0, 1)], [(1, 1), (2, 2)], [(3, 5), (0, 4), (1, 7)]):
            step = [(sequence, TOKENS[round_number + sequence :][:count]) for sequence, count in rows]
            got, want = (loop.step(step, taps) for loop in (replaying, plain))
            assert torch.equal(got[0], want[0])
            assert len(got[1]) == len(taps) and all(map(torch.equal, got[1], want[1]))


@needs_compiler
def test_a_replayed_residual_stays_when_the_next_step_runs(checkpoint: Path) -> None:
    facts, model = load(checkpoint, kernels="native")
    loop = PagedLoop(facts, model)
    sequence = loop.add()
    loop.step([(sequence, TOKENS[:3])])
    loop.step([(sequence, TOKENS[3:6])])
    first, _ = loop.step([(sequence, TOKENS[6:9])])
    before = first.clone()
    loop.step([(sequence, TOKENS[9:12])])
    assert torch.equal(first, before)


@needs_compiler
@pytest.mark.parametrize("how", ["torch", "unseen"])
def test_work_besides_recorded_calls_is_never_left_out_of_a_step(checkpoint: Path, how: str) -> None:
    """A layer that also computes with torch, or where nobody can note it, runs op by op at every step."""
    facts, model = load(checkpoint, kernels="native")
    assert isinstance(model.small_steps, ReplayedSteps)
    last = model.layers[-1][-1]

    def doubled(residual: Tensor, carry: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        residual, carry = last(residual, carry, context)
        if how == "torch":
            return residual.mul_(2.0), carry
        values = (ctypes.c_float * residual.numel()).from_address(residual.data_ptr())
        for i in range(len(values)):
            values[i] *= 2.0
        return residual, carry

    layers = (*model.layers[:-1], (*model.layers[-1][:-1], doubled))
    steps = ReplayedSteps(model.embed, layers, model.rotate, model.attention)
    changed = replace(model, layers=layers, small_steps=steps)
    got, want = (PagedLoop(facts, one) for one in (changed, replace(changed, small_steps=None)))
    for start in range(0, 9, 3):
        tokens = TOKENS[start : start + 3]
        if start == 0:
            rows = got.add(), want.add()
        assert torch.equal(got.step([(rows[0], tokens)])[0], want.step([(rows[1], tokens)])[0])
