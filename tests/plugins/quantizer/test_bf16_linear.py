"""bfloat16 linear layers in panels: every instruction set, odd sizes, and rows that do not notice each other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.native import needs_compiler

from engine.contracts.model import DeviceFacts
from engine.contracts.ops import LinearPart, LinearSpec
from engine.testing.context import build_context
from engine_plugins.quantizer import bf16_linear
from engine_plugins.quantizer.bf16_linear import from_panels, interleaved, pack_bf16, separated, to_panels


@pytest.fixture(params=bf16_linear.INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest) -> str:
    best = bf16_linear.kernels().best_instructions()
    if bf16_linear.INSTRUCTIONS.index(request.param) > best:
        pytest.skip(f"CPU, compiler or system has no {request.param}")
    return str(request.param)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("out", [16, 32, 40, 1, 95])
def test_panels_hold_the_weight_and_zeros(out: int) -> None:
    weight = random(out, 64)
    panels = to_panels(weight)
    assert panels.shape[0] % 2 == 0 and panels.is_contiguous()
    assert torch.equal(from_panels(panels, out), weight)
    assert not from_panels(panels, panels.shape[0] * 16)[out:].any()


@pytest.mark.parametrize("size", [16, 48, 40, 1])
def test_a_pair_of_panels_has_gates_and_ups_of_the_same_outputs(size: int) -> None:
    weight = random(2 * size, 8)
    turns = interleaved(weight)
    assert torch.equal(separated(turns, size), weight)
    assert torch.equal(turns[0], weight[0]) and torch.equal(turns[16], weight[size])


@needs_compiler
@pytest.mark.parametrize(("out", "inputs"), [(32, 32), (96, 896), (1152, 320), (50, 64), (33, 2080)])
def test_any_size_and_any_number_of_rows(out: int, inputs: int, instructions: str) -> None:
    weight, bias = random(out, inputs) * 0.1, random(out, seed=1)
    packed = pack_bf16(LinearSpec((LinearPart("w", out, True),), inputs), weight, bias, instructions)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 31, 32, 33, 48, 64, 511, 513, 1100):
        x = random(rows, inputs, seed=rows)
        want = F.linear(x.double(), weight.double(), bias.double())
        assert float((packed.apply(x).double() - want).abs().max()) <= 2.0**-8 * float(want.abs().max()), rows


@needs_compiler
def test_the_input_may_be_a_view_and_the_sum_may_replace_the_residual(instructions: str) -> None:
    weight = random(48, 64)
    packed = pack_bf16(LinearSpec((LinearPart("w", 48),), 64), weight, None, instructions)
    wide = random(5, 200)
    before = wide.clone()
    x, residual = wide[:, 100:164], random(5, 48, seed=2)
    want = (F.linear(x.float(), weight.float()) + residual.float()).bfloat16()
    assert packed.apply_add is not None
    got = packed.apply_add(x, residual)
    assert torch.allclose(got.float(), want.float(), atol=0.07, rtol=0.01)
    assert got.data_ptr() == residual.data_ptr() and torch.equal(wide, before)


@needs_compiler
def test_a_row_does_not_depend_on_its_neighbours(instructions: str) -> None:
    if instructions not in ("AVX2", "AMX-BF16"):
        pytest.skip("promised with AVX2 and AMX only")
    packed = pack_bf16(LinearSpec((LinearPart("w", 96),), 1024), random(96, 1024), None, instructions)
    x = random(700, 1024)
    whole = packed.apply(x)
    for rows in (1, 5, 16, 33, 64, 600):
        assert torch.equal(packed.apply(x[:rows]), whole[:rows])
        assert torch.equal(packed.apply(x[-rows:]), whole[-rows:])


@needs_compiler
def test_the_gate_saturates_and_does_not_overflow(instructions: str) -> None:
    weight = torch.zeros(32, 32, dtype=torch.bfloat16)
    weight[:16] = torch.eye(32, dtype=torch.bfloat16)[:16] * 1000
    weight[16:] = weight[:16]
    spec = LinearSpec((LinearPart("gate", 16), LinearPart("up", 16)), 32, kind="gate_up")
    packed = pack_bf16(spec, weight, None, instructions)
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, :5] = torch.tensor([1.0, -1.0, 0.001, 3e35, 3e4])
    assert packed.apply_gated is not None
    got = packed.apply_gated(x, "silu")[0].float()
    assert got[0] == pytest.approx(1e6, rel=0.01) and abs(float(got[1])) < 1e-6
    assert got[2] == pytest.approx(1 / (1 + 2.718281828**-1), rel=0.01)
    assert float(got[3]) == float("inf")
    assert got[4] == pytest.approx(9e14, rel=0.01)


@pytest.mark.parametrize("execution", ["compile", "graphs"])
def test_a_gpu_gets_no_weights_in_panels(execution: str) -> None:
    on_gpu = build_context(device=DeviceFacts("cuda", "a GPU", (9, 0)), dtype="bfloat16", execution=execution)
    assert not bf16_linear.wanted(on_gpu)
