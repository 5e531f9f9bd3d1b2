"""The lowered model: fast paths against the reference chain, and what may not change a result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.kernels.settings import Kernels
from tests.kernels import tiny
from tests.kernels.paged_loop import PagedLoop, load
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
    hidden, aux_layers = loop.step([(loop.add(), TOKENS)], aux_layers=(3, 0, 2))
    assert torch.equal(aux_layers[0], hidden)
    assert torch.equal(aux_layers[1], model.embed(torch.tensor(TOKENS)))
    assert not torch.equal(aux_layers[2], hidden)


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
