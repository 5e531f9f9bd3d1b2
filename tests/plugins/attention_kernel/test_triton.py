"""The Triton attention kernels compute what the reference says.

Runs in Triton's interpreter, or on a CUDA device (see ``tests/interpreted.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from tests.selection import few

from engine.contracts.attention_kernel import AttentionKernel
from engine.contracts.config import SlotConfig
from engine.contracts.provider import BuildContext
from engine.testing.attention_cases import (
    TOLERANCE,
    AttentionCase,
    case_named,
    make_context,
    make_inputs,
    measure,
    of_rank,
    reference,
    run,
)
from engine.testing.attention_kernel import CapturableConformance, LogSumExpConformance
from engine.testing.no_sync import NoSync
from engine_plugins.attention_kernel.triton.kernel import TritonAttention
from engine_plugins.attention_kernel.triton.planning import num_splits
from engine_plugins.attention_kernel.triton.tile_ops import tile_lines
from engine_plugins.kv_format.fp8 import FP8Format
from engine_plugins.kv_format.int8 import Int8Format

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
torch.set_num_threads(1)


def on(num_sms: int) -> Any:
    return lambda context: TritonAttention(SlotConfig(), context, num_sms=num_sms)


class TestOnOneMultiprocessor(CapturableConformance, LogSumExpConformance):
    """Too small a device to split keys; every long row goes to the prefill kernel."""

    device = DEVICE
    capabilities = TritonAttention.capabilities

    def make(self, context: BuildContext) -> AttentionKernel:
        return on(1)(context)


class TestOnManyMultiprocessors(CapturableConformance, LogSumExpConformance):
    """Every row is split, far beyond the number of its key tiles: many splits are empty."""

    device = DEVICE
    capabilities = TritonAttention.capabilities

    def make(self, context: BuildContext) -> AttentionKernel:
        return on(8)(context)


class PerHead(Int8Format):
    """int8 with one scale per head."""

    scale = "per_layer_head"


class PerToken(FP8Format):
    """float8 with one scale per token and head."""

    scale = "per_token_head"


CHOSEN = ((Int8Format, 1), (FP8Format, 1), (PerHead, 8), (PerToken, 8))
OTHERS = ((Int8Format, 8), (FP8Format, 8), (PerHead, 1), (PerToken, 1))
"""Formats, and multiprocessors: one takes the prefill kernel, eight the split one."""


@pytest.mark.parametrize(
    ("kind", "num_sms"), [*CHOSEN, *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)]
)
def test_scales_of_a_format_are_folded_into_scores_and_probabilities(kind: Any, num_sms: int) -> None:
    for name in ("chunk_with_history", "verify", "soft_cap_and_window", "decode_of_very_unequal_lengths"):
        case = case_named(name)
        kv_format = kind(SlotConfig(), make_context(case, "float32", DEVICE))
        assert measure(on(num_sms), case, "float32", DEVICE, kv_format) <= TOLERANCE["float32"], name


@pytest.mark.parametrize("kind", [Int8Format, FP8Format])
def test_8_bit_keys_are_multiplied_in_16_bits_without_rounding_them(kind: Any) -> None:
    case = case_named("prefill_decode_verify")
    kv_format = kind(SlotConfig(), make_context(case, "bfloat16", DEVICE))
    assert measure(on(4), case, "bfloat16", DEVICE, kv_format) <= 2 * TOLERANCE["bfloat16"]


LONG = AttentionCase("decode_and_verify_of_a_long_row", ((1, 2111), (3, 130), (1, 3)))
"""Key tiles of 64: the long row has one for each of 32 splits and more, the others a few and a single one."""


@few(1)
@pytest.mark.parametrize(("splits", "sinks"), [(3, False), (17, True), (32, False)])
def test_the_last_program_of_a_tile_merges_any_number_of_parts_and_one_sink(splits: int, sinks: bool) -> None:
    case = replace(LONG, sinks=sinks)
    inputs = make_inputs(case, "float32", DEVICE)
    want = reference(case, inputs)
    kernel = TritonAttention(SlotConfig(), make_context(case, "float32", DEVICE), num_sms=3 * splits)
    kernel._parts.fill_(float("nan"))
    kernel._lse.fill_(float("nan"))
    assert num_splits(len(case.rows) * case.num_kv_heads, 3 * splits, queries=6) == splits
    first = run(kernel, case, inputs)
    assert (first.double() - want).abs().max() <= 1e-5
    assert not kernel._arrived.any(), "the next launch counts from 0"
    assert torch.equal(run(kernel, case, inputs), first)
    assert not kernel._arrived.any()


@few(1)
@pytest.mark.parametrize("rows", [((1, 300), (2, 40)), ((4, 700), (1, 1)), ((2, 200),)])
def test_rows_shorter_than_staged_are_served_and_leave_no_arrivals_after(rows: tuple[tuple[int, int], ...]) -> None:
    """As in a graph captured for more queries and replayed with fewer, down to a row that is not there."""
    case = AttentionCase(f"shorter_{rows}", rows)
    inputs = make_inputs(case, "float32", DEVICE, padding_rows=2 - len(rows))
    kernel = TritonAttention(SlotConfig(), make_context(case, "float32", DEVICE), num_sms=32)
    prepared = kernel.prepare(replace(inputs.batch, q_lens=(20, 20), kv_lens=(0, 0)))
    works = kernel.launches(prepared, case.op)
    assert sum(len(item.work.tiles) for item in works) == 4, "two query tiles a row, some without queries"
    got = kernel.forward(prepared, case.op, inputs.q, inputs.cache)
    assert (got.double() - reference(case, inputs)).abs().max() <= 1e-5
    assert not kernel._arrived.any()


@pytest.mark.parametrize("num_sms", [1, 8])
def test_a_captured_call_of_a_rank_takes_its_ends_from_the_device_and_asks_nothing_of_the_host(num_sms: int) -> None:
    """Prepared for longer rows and other ends, which then change in place."""
    suite, case = TestOnOneMultiprocessor(), case_named("verify")
    real = of_rank(case, make_inputs(case, "float32", DEVICE, padding_rows=1), 2, 1)
    kernel = TritonAttention(SlotConfig(), make_context(case, "float32", DEVICE), num_sms=num_sms)
    changing = ("block_tables", "q_starts", "kv_lens_device", "key_ends")
    widest = (8,) * len(real.batch.q_lens)
    batch = replace(real.batch, q_lens=widest, kv_lens=widest)
    batch = replace(batch, **{name: torch.zeros_like(getattr(batch, name)) for name in changing})
    prepared = kernel.prepare(batch)
    kernel.forward_lse(prepared, case.op, real.q, real.cache)
    for name in changing:
        getattr(batch, name).copy_(getattr(real.batch, name))
    with NoSync():
        out, sums = kernel.forward_lse(prepared, case.op, real.q, real.cache)
    suite.same_lse(case, real, out, sums, "float32")
    assert not kernel._arrived.any()


@few(1)
@pytest.mark.parametrize(("splits", "ends"), [(17, (0, 5, 130)), (32, (64, 64, 2000))])
def test_parts_of_a_rank_are_merged_with_their_log_sum_exp(splits: int, ends: tuple[int, ...]) -> None:
    """Of queries that see nothing, less than others of their tile, and all that the longest row has."""
    case = LONG
    inputs = make_inputs(case, "float32", DEVICE)
    of_row = torch.tensor([2111, *ends, 0], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([2111, ends[-1], 0], dtype=torch.int32, device=DEVICE)
    tables = inputs.batch.block_tables.clone()
    tables[1] = tables[0]
    batch = replace(inputs.batch, key_ends=of_row, kv_lens_device=lengths, block_tables=tables)
    inputs = replace(inputs, batch=batch)
    kernel = TritonAttention(SlotConfig(), make_context(case, "float32", DEVICE), num_sms=3 * splits)
    kernel._parts.fill_(float("nan"))
    kernel._lse.fill_(float("nan"))
    assert num_splits(len(case.rows) * case.num_kv_heads, 3 * splits, queries=6) == splits
    made = kernel.forward_lse(kernel.prepare(batch), case.op, inputs.q, inputs.cache)
    TestOnOneMultiprocessor().same_lse(case, inputs, *made, "float32")
    assert not kernel._arrived.any()


@few(1)
@pytest.mark.parametrize("queries", [1, 4, 8, 32])
def test_verification_of_every_width_is_one_launch_of_the_split_kernel(queries: int) -> None:
    case = AttentionCase(f"width_{queries}", ((queries, 500), (queries, queries)), num_heads=8)
    inputs = make_inputs(case, "bfloat16", DEVICE)
    kernel = TritonAttention(SlotConfig(), make_context(case, "bfloat16", DEVICE), num_sms=64)
    (item,) = kernel.launches(kernel.prepare(inputs.batch), case.op)
    assert item.work.split
    gap = (run(kernel, case, inputs).double() - reference(case, inputs)).abs().max()
    assert gap <= 3 * TOLERANCE["bfloat16"]
    assert not kernel._arrived.any()


def test_layers_of_other_heads_have_query_tiles_of_their_own() -> None:
    """Two and eight heads a key-value head, and latent attention, in one model and one step."""
    rows = ((1, 40), (5, 33))
    cases = [
        AttentionCase("some_heads", rows, 4, 2),
        AttentionCase("other_heads", rows, 8, 1, 64),
        AttentionCase("latent_heads", rows, 8, 1, 40, value_dim=32),
    ]
    context = make_context(cases[0], "float32", DEVICE)
    model = replace(context.model, attentions=tuple(case.op for case in cases))
    kernel = TritonAttention(SlotConfig(), replace(context, model=model), num_sms=16)
    batch = make_inputs(cases[0], "float32", DEVICE).batch
    prepared = kernel.prepare(batch)
    for case in cases:
        inputs = make_inputs(case, "float32", DEVICE, tables_of=cases[0])
        got = kernel.forward(prepared, case.op, inputs.q, inputs.cache)
        assert (got.double() - reference(case, inputs)).abs().max() <= 1e-5, case.name


def test_heads_that_no_tile_has_are_refused_when_the_plugin_is_built() -> None:
    case = AttentionCase("wide", ((1, 40),), 8, 1, 640, value_dim=576)
    with pytest.raises(RuntimeError, match=r"latent keys of 576 \+ 64 numbers: expected .* 8 up to 512 \+ 64"):
        on(1)(make_context(case, "float32", DEVICE))


@triton.jit
def store_tile_lines(
    out_ptr, table_ptr, start, low, high, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr
):
    lines = tile_lines(
        table_ptr, 1, start, low, high, BLOCK_SIZE * 160, 160, 80, VALUE_DIM, BLOCK_SIZE, 16, BLOCK_D, 16
    )
    at = tl.arange(0, 16)[:, None] * lines.shape[1] + tl.arange(0, lines.shape[1])[None, :]
    tl.store(out_ptr + at, lines)


@pytest.mark.parametrize("block_size", [8, 32])
def test_the_lines_of_a_tile_are_those_of_its_keys_and_of_no_other(block_size: int) -> None:
    """Of the second of two heads of 80 numbers of 16 bits, which are two lines each."""
    table = torch.tensor([3, 1, 7, 2], dtype=torch.int32, device=DEVICE)
    start, low, high = 16, 18, 29
    lines = torch.full((16, 2), -1, dtype=torch.int64, device=DEVICE)
    store_tile_lines[(1,)](lines, table, start, low, high, VALUE_DIM=80, BLOCK_SIZE=block_size, BLOCK_D=128)
    slots = [int(table[key // block_size]) * block_size + key % block_size for key in range(start, start + 16)]
    want = [[160 * slot + 80, 160 * slot + 80 + 64] for slot in slots]
    assert lines.tolist() == [of if low <= start + i < high else [0, 0] for i, of in enumerate(want)]
