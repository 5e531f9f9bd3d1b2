"""Linear layers in panels: both dtypes, every instruction set, odd sizes, and rows that do not notice each other."""

from __future__ import annotations

import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.contracts.ops import LinearPart, LinearSpec
from engine.contracts.quantizer import QuantizedWeight
from engine.kernels.cpu.linear import float_linear, integer_linear
from engine.kernels.cpu.linear.float_linear import can_pack, from_panels, pack_float, to_panels
from engine.kernels.cpu.linear.panel_linear import in_turns, interleaved, separated
from engine.kernels.cpu.linear.sources import float_source, integer_source
from engine.kernels.linear import PackedLinear
from engine.native import Source, find_compiler, library_cache
from tests.needs import needs_bfloat16_instructions, needs_compiler

SIZES = [(32, 32), (96, 896), (1152, 320), (50, 64), (33, 2080)]
ODD_SIZES = [(7, 45), (65, 129)]
"""Outputs and inputs; odd numbers of inputs are packed in float32 only."""
EXACT = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8}
"""Largest error, in units of the largest result."""


@dataclass(frozen=True)
class Kind:
    """Weights of a type on some instructions."""

    dtype: torch.dtype
    instructions: str

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}-{self.instructions}"

    def pack(self, spec: LinearSpec, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        return pack_float(spec, weight.to(self.dtype), bias, self.instructions)

    def random(self, *shape: int, seed: int = 0) -> torch.Tensor:
        return random(*shape, seed=seed).to(self.dtype)


FLOAT32 = [Kind(torch.float32, name) for name in ("plain C++", "AVX2", "AVX512")]
"""Compiled to what any processor has: where vectors are narrower, AVX512 is AVX2."""
BFLOAT16 = [Kind(torch.bfloat16, name) for name in ("plain C++", "AVX2", "AVX512", "AVX512-BF16", "AMX-BF16")]


def case(kind: Kind, *values: Any) -> Any:
    """A parameter: bfloat16 kernels run where their instructions are."""
    marks = [needs_bfloat16_instructions(kind.instructions)] if kind in BFLOAT16 else []
    return pytest.param(*values, kind, marks=marks)


@pytest.fixture(params=[case(kind) for kind in FLOAT32 + BFLOAT16], ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    made: Kind = request.param
    return made


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out", [16, 32, 40, 1, 95])
def test_panels_hold_the_weight_and_zeros(out: int, dtype: torch.dtype) -> None:
    weight = random(out, 64).to(dtype)
    panels = to_panels(in_turns(weight, False))
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
@pytest.mark.parametrize(
    ("out", "inputs", "kind"),
    [case(kind, *size) for kind in FLOAT32 for size in SIZES + ODD_SIZES]
    + [case(kind, *size) for kind in BFLOAT16 for size in SIZES],
    ids=str,
)
def test_any_size_and_any_number_of_rows(out: int, inputs: int, kind: Kind) -> None:
    weight, bias = kind.random(out, inputs) * 0.1, kind.random(out, seed=1)
    spec = LinearSpec((LinearPart("w", out, True),), inputs)
    packed = kind.pack(spec, weight, bias)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 31, 32, 33, 48, 64, 511, 513, 1100):
        x = kind.random(rows, inputs, seed=rows)
        want = F.linear(x.double(), weight.double(), bias.double())
        assert float((packed.apply(x).double() - want).abs().max()) <= EXACT[kind.dtype] * float(want.abs().max()), rows


@needs_compiler
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_gates_far_below_zero_close(act: str, kind: Kind) -> None:
    gates, ups = torch.full((32, 32), -1e37), torch.full((32, 32), 1 / 32)
    parts = (LinearPart("gate", 32), LinearPart("up", 32))
    packed = kind.pack(LinearSpec(parts, 32, kind="gate_up"), torch.cat((gates, ups)))
    assert packed.apply_gated is not None
    assert not packed.apply_gated(torch.ones(40, 32, dtype=kind.dtype), act).any()


@needs_compiler
@pytest.mark.parametrize(
    "wrong", [{"x": (3, 96)}, {"x": (3, 32)}, {"y": (2, 48)}, {"y": (3, 64)}, {"residual": (1, 48)}]
)
def test_a_call_with_tensors_of_other_shapes_is_refused(wrong: dict[str, tuple[int, int]]) -> None:
    """Kernels would read or write other memory."""
    weight = QuantizedWeight(torch.ones(48, 64, dtype=torch.int8), torch.ones(48, 1), 64)
    spec = LinearSpec((LinearPart("w", 48),), 64)
    shapes = {"x": (3, 64), "y": (3, 48), "residual": (3, 48)}
    for packed in (pack_float(spec, torch.ones(48, 64), None), integer_linear.pack_integer(spec, weight, "bf16")):
        assert packed.native is not None
        packed.native(*(torch.ones(shape) for shape in shapes.values()))
        with pytest.raises(AssertionError):
            packed.native(*(torch.ones(shape) for shape in (shapes | wrong).values()))


def test_only_bfloat16_asks_for_whole_tiles_of_inputs() -> None:
    odd, whole = LinearSpec((LinearPart("w", 8),), 45), LinearSpec((LinearPart("w", 8),), 64)
    assert can_pack(odd, torch.float32) and not can_pack(odd, torch.bfloat16) and can_pack(whole, torch.bfloat16)
    assert not can_pack(whole, torch.float16)


@needs_compiler
def test_the_input_may_be_a_view_and_the_sum_may_replace_the_residual(kind: Kind) -> None:
    weight = kind.random(48, 64)
    packed = kind.pack(LinearSpec((LinearPart("w", 48),), 64), weight)
    wide = kind.random(5, 200)
    before = wide.clone()
    x, residual = wide[:, 100:164], kind.random(5, 48, seed=2)
    want = F.linear(x.double(), weight.double()) + residual.double()
    assert packed.apply_add is not None
    got = packed.apply_add(x, residual)
    assert float((got.double() - want).abs().max()) <= EXACT[kind.dtype] * float(want.abs().max())
    assert got.data_ptr() == residual.data_ptr() and torch.equal(wide, before)


@needs_compiler
@pytest.mark.parametrize(
    ("inputs", "kind"),
    [case(kind, inputs) for kind in FLOAT32 for inputs in (1024, 300)]
    + [case(kind, 1024) for kind in BFLOAT16 if kind.instructions != "AVX512-BF16"],
    ids=str,
)
def test_a_row_does_not_depend_on_its_neighbours(inputs: int, kind: Kind) -> None:
    """With AVX512-BF16 it is not promised."""
    spec = LinearSpec((LinearPart("w", 96),), inputs)
    packed = kind.pack(spec, kind.random(96, inputs))
    x = kind.random(700, inputs)
    whole = packed.apply(x)
    for rows in (1, 2, 3, 4, 5, 6, 8, 11, 16, 33, 64, 600):
        assert torch.equal(packed.apply(x[:rows]), whole[:rows])
        assert torch.equal(packed.apply(x[-rows:]), whole[-rows:])


@needs_compiler
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_a_gate_and_up_projection_of_any_size_is_gated(act: str, kind: Kind) -> None:
    size = 43
    spec = LinearSpec((LinearPart("gate", size, True), LinearPart("up", size, True)), 64, kind="gate_up")
    weight, bias = kind.random(2 * size, 64) * 0.1, kind.random(2 * size, seed=1)
    packed = kind.pack(spec, weight, bias)
    assert packed.apply_gated is not None
    for rows in (1, 5, 40):
        x = kind.random(rows, 64, seed=rows)
        gate, up = F.linear(x.double(), weight.double(), bias.double()).chunk(2, dim=1)
        want = (F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh")) * up
        got = packed.apply_gated(x, act).double()
        assert float((got - want).abs().max()) <= EXACT[kind.dtype] * float(want.abs().max())


@needs_compiler
def test_the_gate_saturates_and_does_not_overflow(kind: Kind) -> None:
    weight = torch.zeros(32, 32, dtype=kind.dtype)
    weight[:16] = torch.eye(32, dtype=kind.dtype)[:16] * 1000
    weight[16:] = weight[:16]
    spec = LinearSpec((LinearPart("gate", 16), LinearPart("up", 16)), 32, kind="gate_up")
    packed = kind.pack(spec, weight)
    x = torch.zeros(1, 32, dtype=kind.dtype)
    x[0, :5] = torch.tensor([1.0, -1.0, 0.001, 3e35, 3e4])
    assert packed.apply_gated is not None
    got = packed.apply_gated(x, "silu")[0].float()
    assert got[0] == pytest.approx(1e6, rel=0.01) and abs(float(got[1])) < 1e-6
    assert got[2] == pytest.approx(1 / (1 + 2.718281828**-1), rel=0.01)
    assert float(got[3]) == float("inf")
    assert got[4] == pytest.approx(9e14, rel=0.01)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [(33,), (16, 16), (40, 40)])
def test_what_is_kept_has_the_bytes_that_were_announced(parts: tuple[int, ...], dtype: torch.dtype) -> None:
    spec = LinearSpec(
        tuple(LinearPart(f"w{i}", out, i == 0) for i, out in enumerate(parts)), 64,
        kind="gate_up" if len(parts) == 2 else "linear",
    )  # fmt: skip
    packed = pack_float(spec, random(sum(parts), 64).to(dtype), random(sum(parts)))
    assert sum(tensor.nbytes for tensor in packed.tensors.values()) == float_linear.packed_bytes(spec, dtype)


@needs_compiler
def test_bfloat16_takes_the_instructions_that_were_measured_to_be_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"AVX512-BF16": 101.0, "AVX512": 158.0, "AVX2": 107.0}
    monkeypatch.setattr(float_linear, "bfloat16_rates", lambda: rates)
    assert float_linear.best_instructions(torch.bfloat16) == "AVX512"
    packed = pack_float(LinearSpec((LinearPart("w", 32),), 64), random(32, 64).bfloat16(), None)
    assert packed.label == "bfloat16 panels, AVX512 (158 GFLOP/s a core; AVX2 107)"


@needs_compiler
def test_what_another_process_may_not_use_is_measured_and_chosen_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux may refuse AMX to some, and they may start first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(float_linear, "bfloat16_rates", float_linear.bfloat16_rates.__wrapped__)
    rates = {"AVX2": 60.0, "AVX512": 100.0, "AMX-BF16": 1000.0}

    def best(*names: str) -> str:
        monkeypatch.setattr(float_linear, "available", lambda _: names)
        monkeypatch.setattr(float_linear, "_measure_bfloat16", lambda: {name: rates[name] for name in names})
        return float_linear.best_instructions(torch.bfloat16)

    refused, allowed = ("AVX2", "AVX512"), ("AVX2", "AVX512", "AMX-BF16")
    for _ in range(2):
        assert best(*refused) == "AVX512" and best(*allowed) == "AMX-BF16"


@needs_compiler
def test_measuring_takes_none_of_torchs_random_numbers() -> None:
    before = torch.get_rng_state()
    float_linear._measure_bfloat16()
    assert torch.equal(torch.get_rng_state(), before)


FIRST_PRODUCT = """
import torch
from engine.contracts.ops import LinearPart, LinearSpec
from engine.kernels.cpu.linear.float_linear import pack_float

packed = pack_float(LinearSpec((LinearPart("w", 32),), 64), torch.ones(32, 64).bfloat16(), None)
assert (packed.apply(torch.ones(33, 64).bfloat16()) == 64).all()
"""


@needs_compiler
def test_a_process_that_finds_rates_kept_may_use_what_they_choose() -> None:
    """Linux ends a process that uses AMX without having asked for it."""
    float_linear.bfloat16_rates()
    done = subprocess.run([sys.executable, "-c", FIRST_PRODUCT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])


REFUSED = """
import ctypes, struct

LOAD, EQUAL, RETURN, ALLOW, EPERM = 0x20, 0x15, 0x06, 0x7FFF0000, 0x50001  # linux/filter.h, linux/seccomp.h
steps = [(LOAD, 0, 0, 0), (EQUAL, 0, 3, 158), (LOAD, 0, 0, 16), (EQUAL, 0, 1, 0x1023), (RETURN, 0, 0, EPERM),
         (RETURN, 0, 0, ALLOW)]  # arch_prctl, ARCH_REQ_XCOMP_PERM
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None)
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2
assert libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0 == libc.prctl(SECCOMP, FILTER, program, 0, 0)
"""


@needs_bfloat16_instructions("AMX-BF16")
def test_a_process_that_is_refused_amx_multiplies_without() -> None:
    program = f"{REFUSED}\n{FIRST_PRODUCT}\nassert 'AMX' not in packed.label, packed.label"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    assert "AMX-BF16" in float_linear.bfloat16_rates()


@needs_compiler
@pytest.mark.parametrize(
    "source", [float_source("bfloat16"), integer_source("bfloat16", "bytes")], ids=lambda source: source.name
)
def test_what_a_thread_keeps_from_call_to_call_is_not_kept_for_every_kernel(source: Source) -> None:
    """The loader fills the whole of it for each thread at its first call."""
    compiler = find_compiler()
    assert not isinstance(compiler, str)
    assert thread_local_bytes(library_cache.build(compiler, source)) < 32 * 1024


def thread_local_bytes(library: bytes) -> int:
    """Of an ELF file for 64 bits: the size in memory of its segment of type ``PT_TLS``."""
    (start,), (size, count) = struct.unpack_from("<Q", library, 0x20), struct.unpack_from("<HH", library, 0x36)
    segments = range(start, start + size * count, size)
    types = (struct.unpack_from("<I", library, at)[0] for at in segments)
    return sum(
        struct.unpack_from("<Q", library, at + 40)[0] for at, kind in zip(segments, types, strict=True) if kind == 7
    )


@needs_compiler
def test_each_of_the_available_instructions_has_a_rate_that_stays() -> None:
    rates = float_linear.bfloat16_rates()
    assert set(rates) == set(float_linear.available(torch.bfloat16)) and min(rates.values()) > 0
    float_linear.bfloat16_rates.cache_clear()
    assert float_linear.bfloat16_rates() == rates


@needs_compiler
@pytest.mark.parametrize("kind", [case(kind) for kind in BFLOAT16], ids=str)
def test_rows_whole_pages_apart_give_what_near_rows_give(kind: Kind) -> None:
    """Their tiles are copied, with AMX."""
    inputs, rows = 64, 40
    packed = kind.pack(LinearSpec((LinearPart("w", 32),), inputs), kind.random(32, inputs))
    near = kind.random(rows, inputs, seed=1)
    far = torch.zeros(rows, 2048, dtype=torch.bfloat16)
    far[:, :inputs] = near
    assert torch.equal(packed.apply(far[:, :inputs]), packed.apply(near))
