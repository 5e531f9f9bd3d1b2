"""Each rank rounds its own share of a layer: what of it is what one rank would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import model_facts, model_graph
from tests.kernels import tiny
from tests.selection import few
from tools.benchmarks.ranks import communicator
from torch import Tensor

from engine.assembly.device_facts import device_facts
from engine.contracts.ops import LinearPart, LinearSpec, Share
from engine.contracts.quantizer import Quantizer
from engine.models.layout import Layout
from engine.models.sharding import smallest_cut
from engine.testing.context import build_context
from engine.testing.paged_loop import PagedLoop, loaded
from engine.testing.plain import PlainQuantizer
from engine.testing.ranks import Ranks, compare, logits, steps_of
from engine_plugins.quantizer.config import FP8Config, Int4Config, Int8Config
from engine_plugins.quantizer.on_load import FP8, Int4, Int8

CONTEXT = build_context(device=device_facts("cpu"), dtype="float32")
SPEC = LinearSpec((LinearPart("p", 40),), 112)
WEIGHT = torch.randn(40, 112, generator=torch.Generator().manual_seed(3))
STEPS = steps_of([[7 * i % 120 for i in range(23)], [11 * i % 120 for i in range(15)]], (9, 1, 5))


def int4() -> Quantizer:
    return Int4(Int4Config(group_size=32), CONTEXT)


def int8() -> Quantizer:
    return Int8(Int8Config(), CONTEXT)


def fp8() -> Quantizer:
    return FP8(FP8Config(), CONTEXT)


def weights(quantizer: Quantizer, spec: LinearSpec, weight: Tensor) -> Tensor:
    """The rounded ones."""
    made: Any = quantizer.pack(spec, [{"weight": weight}], torch.float32, "cpu")
    found: Tensor = made.dense()
    return found


def share(out: tuple[int, int] | None = None, inputs: tuple[int, int] | None = None) -> tuple[LinearSpec, Tensor]:
    rows, columns = out or (0, 40), inputs or (0, 112)
    own = Share(SPEC, ((rows,),), inputs)
    spec = LinearSpec((LinearPart("p", rows[1] - rows[0]),), columns[1] - columns[0], share=own)
    return spec, WEIGHT[slice(*rows), slice(*columns)].contiguous()


@pytest.mark.parametrize("make", [int4, int8, fp8])
def test_outputs_of_a_rank_are_rounded_as_those_of_one(make: Any) -> None:
    whole = weights(make(), SPEC, WEIGHT)
    found = [weights(make(), *share(out=rows)) for rows in ((0, 17), (17, 40))]
    assert torch.equal(torch.cat(found), whole)


def test_inputs_are_cut_between_groups_that_share_a_scale() -> None:
    """Of 112 inputs there are four groups, the last of half the size: rounded as by one rank."""
    quantizer = int4()
    assert (smallest_cut(quantizer, SPEC, "in"), smallest_cut(quantizer, SPEC, "out")) == (32, 1)
    found = [weights(int4(), *share(inputs=columns)) for columns in ((0, 64), (64, 112))]
    assert torch.equal(torch.cat(found, dim=1), weights(quantizer, SPEC, WEIGHT))


@pytest.mark.parametrize(("make", "steps"), [(int8, 127), (fp8, None)])
def test_inputs_of_a_channel_have_a_scale_on_each_rank(make: Any, steps: int | None) -> None:
    """It is that of the rank's own weights, and so no larger than one for all: rounding errors are no larger."""
    assert smallest_cut(make(), SPEC, "in") == 1
    for columns in ((0, 50), (50, 112)):
        spec, weight = share(inputs=columns)
        found, largest = weights(make(), spec, weight), weight.abs().amax(dim=1, keepdim=True)
        if steps is None:  # half of the last of three bits, or of the smallest number
            bound = weight.abs() / 16 + largest / 448 * 2**-10
        else:
            bound = largest / steps / 2
        assert bool(((found - weight).abs() <= bound * 1.001).all())


@few(3)
@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("make", [int4, int8, fp8])
def test_models_are_rounded_as_well_as_on_one_rank(make: Any, tp: int, tmp_path: Path) -> None:
    """int4 computes the same as one rank; formats with a scale for each output channel are as near to the weights."""
    folder = tiny.write(tmp_path)
    model = model_facts(str(folder)), model_graph(str(folder))
    if make is int4 and tp == 3:
        with pytest.raises(ValueError, match=r"q_proj, of one key head, has 1 part.*tp=1, 2 would fit"):
            Ranks(*model, Layout(tp), communicator, quantizer=make())
        return
    plain = logits(PagedLoop(loaded(*model, "torch", PlainQuantizer())), STEPS)
    alone = logits(PagedLoop(loaded(*model, "torch", make())), STEPS)
    with Ranks(*model, Layout(tp), communicator, quantizer=make()) as ranks:
        together = ranks.logits(STEPS)
    found = compare(alone, together)
    assert found.is_one
    if make is int4:
        assert found.drift <= 2e-5
    assert error(together[0], plain) <= 1.25 * error(alone, plain)


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).square().mean().sqrt())
