"""The Triton attention kernels compute what the reference says.

Runs under ``TRITON_INTERPRET=1`` (which must be set before triton is first imported, so
``test_triton_interpreter.py`` runs this module in its own process) and on a CUDA device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.contracts.attention_kernel import AttentionKernel
from engine.contracts.config import SlotConfig
from engine.contracts.provider import BuildContext
from engine.testing.attention_cases import (
    SMALL_CASES,
    TOLERANCE,
    AttentionCase,
    case_named,
    make_context,
    make_inputs,
    measure,
    reference,
    run,
)
from engine.testing.attention_kernel import AttentionKernelConformance
from engine_plugins.attention_kernel.triton.kernel import TritonAttention
from engine_plugins.attention_kernel.triton.planning import num_splits

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret and not torch.cuda.is_available(),
    reason="runs in test_triton_interpreter.py, or here with TRITON_INTERPRET=1 or a CUDA device",
)
DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
torch.set_num_threads(1)


def on(num_sms: int) -> Any:
    return lambda context: TritonAttention(SlotConfig(), context, num_sms=num_sms)


class TestOnOneMultiprocessor(AttentionKernelConformance):
    """Too small a device to split keys; every long row goes to the prefill kernel."""

    device = DEVICE

    def make(self, context: BuildContext) -> AttentionKernel:
        return on(1)(context)


class TestOnManyMultiprocessors(AttentionKernelConformance):
    """Every row is split, far beyond the number of its key tiles: many splits are empty."""

    device = DEVICE

    def make(self, context: BuildContext) -> AttentionKernel:
        return on(8)(context)


@triton.jit
def load_scaled(ptr, offsets, mask, scale_ptr, scale_offsets, DTYPE: tl.constexpr):
    scale = tl.load(scale_ptr + scale_offsets)
    return tl.where(mask, tl.load(ptr + offsets, mask=mask, other=0).to(tl.float32) * scale, 0.0).to(DTYPE)


class Int8Format:
    """Symmetric int8 with one scale per token and head, or per head."""

    lossless = False

    def __init__(self, scale: Literal["per_layer_head", "per_token_head"]) -> None:
        self.scale = scale

    def storage_dtype(self, compute_dtype: str) -> str:
        return "int8"

    def pack(self, x: Tensor, scale: Tensor) -> Tensor:
        return (x.float() / scale[..., None]).round().clamp(-127, 127).to(torch.int8)

    def unpack(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        return (x.float() * scale[..., None]).to(dtype)

    def load_tile(self) -> Any:
        return load_scaled


@pytest.mark.parametrize("scale", ["per_layer_head", "per_token_head"])
@pytest.mark.parametrize("num_sms", [1, 8])
def test_a_format_unpacks_its_tiles_inside_the_kernels(scale: Any, num_sms: int) -> None:
    for name in ("chunk_with_history", "verify"):
        assert measure(on(num_sms), case_named(name), "float32", DEVICE, Int8Format(scale)) <= TOLERANCE["float32"]


def test_queries_may_be_a_view_of_a_fused_projection() -> None:
    case = case_named("prefill_decode_verify")
    inputs = make_inputs(case, "float32", DEVICE)
    fused = torch.full((inputs.q.shape[0], case.num_heads + 4, case.head_dim), float("nan"), device=DEVICE)
    fused[:, : case.num_heads] = inputs.q
    want = reference(case, inputs)
    kernel = on(4)(make_context(case, "float32", DEVICE))
    got = kernel.record(
        kernel.stage(inputs.batch), case.op, fused[:, : case.num_heads], inputs.k_cache, inputs.v_cache,
        Plain(), None, None,
    )  # fmt: skip
    assert (got.double() - want).abs().max() <= 1e-5


class Plain:
    """A format without scales or unpacking."""

    scale = "none"
    lossless = True

    def load_tile(self) -> None:
        return None


def test_one_kernel_object_serves_batches_of_every_shape_in_turn() -> None:
    """Scratch and cached tile lists of one batch must not leak into the next."""
    cases = [case for case in SMALL_CASES if case.head_dim == 32 and case.num_heads == 4 and case.block_size == 8]
    kernel = on(8)(make_context(cases[0], "float32", DEVICE))
    few = [case for case in cases if case.name in ("one_token", "verify", "window_of_one")]
    for case in (*few, *reversed(few)):
        inputs = make_inputs(case, "float32", DEVICE)
        assert (run(kernel, case, inputs).double() - reference(case, inputs)).abs().max() <= 1e-5, case.name


LONG = AttentionCase("decode_and_verify_of_a_long_row", ((1, 2111), (3, 130), (1, 3)))
"""Key tiles of 64: the long row has one for each of 32 splits and more, the others a few and a single one."""


@pytest.mark.parametrize("splits", [1, 3, 16, 17, 32])
def test_the_last_program_of_a_tile_merges_any_number_of_parts(splits: int) -> None:
    inputs = make_inputs(LONG, "float32", DEVICE)
    want = reference(LONG, inputs)
    kernel = TritonAttention(SlotConfig(), make_context(LONG, "float32", DEVICE), num_sms=3 * splits)
    kernel._parts.fill_(float("nan"))
    kernel._lse.fill_(float("nan"))
    assert num_splits(len(LONG.rows) * LONG.num_kv_heads, 3 * splits, queries=6) == splits
    first = run(kernel, LONG, inputs)
    assert (first.double() - want).abs().max() <= 1e-5
    assert not kernel._arrived.any(), "the next launch counts from 0"
    assert torch.equal(run(kernel, LONG, inputs), first)
    assert not kernel._arrived.any()


@pytest.mark.parametrize("rows", [((1, 300), (2, 40)), ((4, 700), (1, 1)), ((2, 200),)])
def test_rows_shorter_than_staged_are_served_and_leave_no_arrivals_behind(rows: tuple[tuple[int, int], ...]) -> None:
    """As in a graph captured for more queries and replayed with fewer, down to a row that is not there."""
    case = AttentionCase(f"shorter_{rows}", rows)
    inputs = make_inputs(case, "float32", DEVICE, padding_rows=2 - len(rows))
    kernel = TritonAttention(SlotConfig(), make_context(case, "float32", DEVICE), num_sms=32)
    staged = kernel.stage(replace(inputs.batch, q_lens=(20, 20), kv_lens=(0, 0)))
    assert sum(len(item.work.tiles) for item in staged.works) == 4, "two query tiles a row, some without queries"
    got = kernel.record(staged, case.op, inputs.q, inputs.k_cache, inputs.v_cache, Plain(), None, None)
    assert (got.double() - reference(case, inputs)).abs().max() <= 1e-5
    assert not kernel._arrived.any()


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 32])
def test_verification_of_every_width_is_one_launch_of_the_split_kernel(width: int) -> None:
    case = AttentionCase(f"width_{width}", ((width, 500), (width, width)), num_heads=8)
    inputs = make_inputs(case, "bfloat16", DEVICE)
    kernel = TritonAttention(SlotConfig(), make_context(case, "bfloat16", DEVICE), num_sms=64)
    (item,) = kernel.stage(inputs.batch).works
    assert item.work.split
    gap = (run(kernel, case, inputs).double() - reference(case, inputs)).abs().max()
    assert gap <= 3 * TOLERANCE["bfloat16"]
    assert not kernel._arrived.any()
