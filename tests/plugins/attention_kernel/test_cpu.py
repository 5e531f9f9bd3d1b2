"""The compiled attention kernel: the shared conformance cases, and every path that depends on shapes or processor."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.needs import needs_amx, needs_compiler, needs_x86
from tests.selection import few
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch, AttentionKernel
from engine.contracts.config import SlotConfig
from engine.contracts.model import DeviceFacts
from engine.contracts.provider import BuildContext
from engine.kernels.torch.reference import paged_attention
from engine.native import file_cache, find_compiler, loader, shared_library
from engine.testing.attention_cases import SMALL_CASES, PlainFormat, case_named
from engine.testing.attention_kernel import (
    TOLERANCE,
    AttentionCase,
    LogSumExpConformance,
    NativeConformance,
    error,
    make_context,
    make_inputs,
    measure,
    reference,
    run,
)
from engine.testing.context import build_context
from engine_plugins.attention_kernel.cpu import kernel as cpu
from engine_plugins.attention_kernel.cpu.kernel import CpuAttention, kernels
from engine_plugins.devices import only_compiling_cpus
from engine_plugins.kv_format.fp8 import FP8Format
from engine_plugins.kv_format.int8 import Int8Format


@pytest.fixture(params=["vectors", pytest.param("AMX", marks=needs_amx)])
def use_amx(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "AMX")


@pytest.fixture
def three_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def build(context: BuildContext, use_amx: bool = True) -> CpuAttention:
    return CpuAttention(SlotConfig(), context, use_amx=use_amx)


def check(case: AttentionCase, dtype: str, use_amx: bool) -> None:
    worst = measure(lambda context: build(context, use_amx), case, dtype, "cpu")
    assert worst <= TOLERANCE[dtype], f"{case.name} {dtype}: error {worst:.2e}"


@needs_compiler
class TestCpuAttention(NativeConformance, LogSumExpConformance):
    capabilities = CpuAttention.capabilities

    def make(self, context: BuildContext) -> AttentionKernel:
        return build(context)


@needs_compiler
class TestCpuAttentionOnVectors(NativeConformance, LogSumExpConformance):
    capabilities = CpuAttention.capabilities

    def make(self, context: BuildContext) -> AttentionKernel:
        return build(context, use_amx=False)


ROWS = ((1, 300), (40, 40), (3, 129), (90, 500))
SHAPES = (
    AttentionCase("group_of_1", ROWS, 3, 3, 64, 16),
    AttentionCase("group_of_2", ROWS, 4, 2, 48, 16),
    AttentionCase("group_of_7", ROWS, 14, 2, 64, 16),
    AttentionCase("group_of_40", ROWS, 40, 1, 32, 16),
    AttentionCase("head_dim_8", ROWS, 4, 2, 8, 16),
    AttentionCase("head_dim_of_no_multiple", ROWS, 4, 2, 21, 16),
    AttentionCase("head_dim_72", ROWS, 8, 1, 72, 16),
    AttentionCase("head_dim_256", ROWS, 4, 1, 256, 16),
    AttentionCase("blocks_of_5", ROWS, 6, 2, 64, 5),
    AttentionCase("window_within_a_tile", ROWS, 14, 2, 64, 16, window=7),
    AttentionCase("window_cuts_blocks_and_chunks", ((1, 700), (300, 900)), 14, 2, 64, 16, window=271),
    AttentionCase("window_over_few_columns", ((1, 700), (2, 900)), 2, 2, 64, 16, window=271),
    AttentionCase("soft_cap_over_few_columns", ROWS, 2, 2, 64, 16, soft_cap=5.0),
    AttentionCase("soft_cap_and_window", ROWS, 14, 2, 64, 16, soft_cap=50.0, window=100, scale=0.3),
    AttentionCase("large_scale", ROWS, 14, 2, 64, 16, scale=0.5),
)


@needs_compiler
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.name)
def test_every_shape_on_every_path(case: AttentionCase, use_amx: bool) -> None:
    check(case, "bfloat16", use_amx)


@needs_compiler
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.name)
def test_every_shape_in_float32(case: AttentionCase) -> None:
    check(case, "float32", use_amx=False)


@few(1)
@needs_compiler
@pytest.mark.parametrize("name", ["long_chunk_beside_decode", "prompts_of_unequal_lengths", "verify_batch"])
def test_real_sizes(name: str, use_amx: bool) -> None:
    check(case_named(name), "bfloat16", use_amx)


LONG_ROWS = tuple(
    AttentionCase(f"{heads}_heads_window_{window}", ((1, 5003), (1, 2), (2, 4100)), *heads, 32, 16, window=window)
    for heads in ((1, 1), (2, 2), (7, 1))
    for window in (None, 3000)
)


@needs_compiler
@pytest.mark.parametrize("case", LONG_ROWS, ids=lambda case: case.name)
def test_keys_of_long_rows_are_split_between_threads(case: AttentionCase, use_amx: bool, three_threads: Any) -> None:
    kernel = build(make_context(case, "bfloat16", "cpu"), use_amx)
    assert kernel.most_splits(kernel.prepare(make_inputs(case, "bfloat16", "cpu").batch), case.op) > 1
    check(case, "bfloat16", use_amx)


@needs_compiler
@pytest.mark.parametrize("case", LONG_ROWS, ids=lambda case: case.name)
def test_keys_of_long_rows_are_split_in_float32(case: AttentionCase, three_threads: Any) -> None:
    check(case, "float32", use_amx=False)


SPLIT_AMONG_QUERIES = AttentionCase("split_among_queries", ((1, 1542), (1, 1507), (200, 200), (599, 600)), 4, 2, 64, 16)


@few(3)
@needs_compiler
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("window", [None, 300])
def test_a_query_that_sees_no_key_of_a_split_adds_nothing(head_dim: int, window: int | None, use_amx: bool) -> None:
    """Whichever way the scale rounds scores: of these the default scales round both ways."""
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            case = dataclasses.replace(SPLIT_AMONG_QUERIES, head_dim=head_dim, window=window)
            check(case, "float32", use_amx=False)
            check(case, "bfloat16", use_amx)
        finally:
            torch.set_num_threads(before)


@needs_compiler
def test_queries_may_be_a_part_of_wider_rows(use_amx: bool) -> None:
    case = case_named("prefill_decode_verify")
    inputs = make_inputs(case, "bfloat16", "cpu")
    qkv = torch.full((inputs.q.shape[0], (case.num_heads + 4) * case.head_dim), float("nan"), dtype=torch.bfloat16)
    q = qkv.view(qkv.shape[0], -1, case.head_dim)[:, : case.num_heads]
    q.copy_(inputs.q)
    kernel = build(make_context(case, "bfloat16", "cpu"), use_amx)
    whole = run(kernel, case, inputs)
    assert torch.equal(run(kernel, case, dataclasses.replace(inputs, q=q)), whole)
    heads_apart = inputs.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(run(kernel, case, dataclasses.replace(inputs, q=heads_apart)), whole)


@needs_compiler
def test_block_tables_may_be_a_part_of_wider_ones() -> None:
    case = case_named("prefill_decode_verify")
    inputs = make_inputs(case, "float32", "cpu")
    tables = inputs.batch.block_tables
    wide = torch.full((tables.shape[0], tables.shape[1] + 3), -1, dtype=torch.int32)
    part = wide[:, : tables.shape[1]]
    part.copy_(tables)
    kernel = build(make_context(case, "float32", "cpu"))
    prepared = kernel.prepare(dataclasses.replace(inputs.batch, block_tables=part))
    assert prepared.step.table_stride == wide.shape[1] and prepared.step.block_tables == wide.data_ptr()
    got = kernel.forward(prepared, case.op, inputs.q, inputs.cache)
    assert error(got, reference(case, inputs)) <= TOLERANCE["float32"]


@needs_compiler
def test_one_stage_serves_layers_of_different_kinds() -> None:
    plain = case_named("prefill_decode_verify")
    inputs = make_inputs(plain, "float32", "cpu")
    kernel = build(make_context(plain, "float32", "cpu"))
    prepared = kernel.prepare(inputs.batch)
    for changes in ({}, {"window": 9}, {"soft_cap": 2.0}, {"scale": 1.0}, {}):
        case = dataclasses.replace(plain, **changes)
        got = kernel.forward(prepared, case.op, inputs.q, inputs.cache)
        assert error(got, reference(case, inputs)) <= TOLERANCE["float32"], changes


class PerHead(Int8Format):
    """int8 with one scale per head."""

    scale = "per_layer_head"


class PerToken(FP8Format):
    """float8 with one scale per token and head."""

    scale = "per_token_head"


SCALED = (Int8Format, PerHead, FP8Format, PerToken)


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", SCALED)
def test_scaled_keys_are_widened_and_their_scales_folded(use_amx: bool, kind: Any, dtype: str) -> None:
    for case in SMALL_CASES:
        context = make_context(case, dtype, "cpu")
        kv_format = kind(SlotConfig(), context)
        worst = measure(lambda context: build(context, use_amx), case, dtype, "cpu", kv_format)
        assert worst <= 2 * TOLERANCE[dtype], case.name


@needs_compiler
@pytest.mark.parametrize("kind", [Int8Format, FP8Format])
def test_every_8_bit_number_is_read_exactly(kind: Any) -> None:
    """One key each: what comes out is its value."""
    case = AttentionCase("bytes", tuple((1, 1) for _ in range(16)), num_heads=1, num_kv_heads=1, head_dim=16)
    inputs = make_inputs(case, "float32", "cpu", kind(SlotConfig(), make_context(case, "float32", "cpu")))
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(16, 16)
    for row, block in enumerate(inputs.batch.block_tables[:, 0].tolist()):
        inputs.cache.v[block, 0, 0] = codes[row].view(inputs.cache.v.dtype)
    assert inputs.cache.v_scale is not None
    inputs.cache.v_scale.fill_(1.0)
    got = run(build(make_context(case, "float32", "cpu")), case, inputs)
    want = codes.view(inputs.cache.v.dtype).float()
    assert int(want.isnan().sum()) in (0, 2)
    assert torch.allclose(got[~want.isnan()], want[~want.isnan()], rtol=1e-6, atol=0.0)


class WiderFormat(PlainFormat):
    """float32 whatever the compute dtype."""

    def storage_dtype(self, compute_dtype: str) -> str:
        return "float32"

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        return x.float()


@needs_compiler
def test_other_ways_to_store_keys_are_left_to_torch() -> None:
    for name in ("prefill_decode_verify", "soft_cap_and_window"):
        worst = measure(build, case_named(name), "bfloat16", "cpu", WiderFormat())
        assert worst <= TOLERANCE["bfloat16"], name


@needs_compiler
def test_the_plan_says_what_computes_a_layer(use_amx: bool) -> None:
    case = case_named("verify")
    kernel = build(make_context(case, "bfloat16", "cpu"), use_amx)
    instructions = "AMX-BF16" if use_amx else "vectors"
    unscaled = dataclasses.replace(case, scale=0.0).op
    assert kernel.label(case.op, "bfloat16", PlainFormat()) == f"CpuAttention, {instructions}"
    assert kernel.label(case.op, "float32", PlainFormat()) == "CpuAttention, vectors"
    assert kernel.label(case.op, "float16", PlainFormat()) == "TorchAttention for float16"
    int8 = Int8Format(SlotConfig(), make_context(case, "bfloat16", "cpu"))
    assert kernel.label(case.op, "bfloat16", int8) == f"CpuAttention, {instructions}, int8 keys and values"
    assert kernel.label(case.op, "float16", int8) == "TorchAttention for float16"
    assert kernel.label(case.op, "bfloat16", WiderFormat()) == "TorchAttention for keys and values in float32"
    assert kernel.label(unscaled, "bfloat16", PlainFormat()) == "TorchAttention for scale=0.0"


@needs_compiler
@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_scales_that_are_not_positive_are_left_to_torch(scale: float) -> None:
    check(dataclasses.replace(case_named("chunk_window"), scale=scale), "float32", use_amx=False)


@few(1)
@needs_compiler
@needs_x86
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_code_for_processors_without_wide_vectors(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``-march=native`` leaves out on this machine is correct, too."""
    here = find_compiler()
    assert not isinstance(here, str)
    oldest = dataclasses.replace(here, command=(*here.command, "-march=x86-64"))
    monkeypatch.setattr(shared_library, "find_compiler", lambda: oldest)
    monkeypatch.setattr(file_cache, "cache_folder", lambda: tmp_path)
    uncached = shared_library.open_library.__wrapped__
    for module in (shared_library, loader):
        monkeypatch.setattr(module, "open_library", uncached)
    baseline_kernels = cache(kernels.__wrapped__)
    kind = getattr(torch, dtype)
    assert not baseline_kernels(kind, kind).can_use_amx()
    monkeypatch.setattr(cpu, "kernels", baseline_kernels)
    for case in SHAPES:
        check(case, dtype, use_amx=False)


def cases() -> st.SearchStrategy[AttentionCase]:
    """Mixed batches: padding rows, decodes, verification, prompts and chunks, of any heads."""
    row = st.one_of(
        st.tuples(st.just(1), st.integers(0, 700)),
        st.tuples(st.integers(2, 16), st.integers(0, 300)),
        st.tuples(st.integers(17, 120), st.just(0) | st.integers(0, 300)),
    ).map(lambda pair: (pair[0], pair[0] + pair[1]))
    return st.builds(
        lambda rows, kv_heads, group, **other: AttentionCase("mixed", tuple(rows), kv_heads * group, kv_heads, **other),
        st.lists(row, min_size=1, max_size=6),
        st.integers(1, 3),
        st.integers(1, 9),
        head_dim=st.sampled_from([8, 16, 32, 40, 64, 80, 128]),
        block_size=st.sampled_from([1, 8, 16, 24, 256]),
        window=st.none() | st.integers(1, 400),
        soft_cap=st.none() | st.sampled_from([2.0, 30.0]),
    )


@needs_compiler
@settings(max_examples=60)
@given(case=cases(), dtype=st.sampled_from(["float32", "bfloat16"]), use_amx=st.booleans())
def test_any_batch_equals_the_plain_version(case: AttentionCase, dtype: str, use_amx: bool) -> None:
    inputs = make_inputs(case, dtype, "cpu")
    got = run(build(make_context(case, dtype, "cpu"), use_amx), case, inputs)
    want = paged_attention(inputs.batch, case.op, inputs.q, inputs.cache)
    # The plain version rounds to bfloat16, too, perhaps to the other side.
    slack = 2.0**-8 if dtype == "bfloat16" else 0.0
    assert error(got, want.double()) <= TOLERANCE[dtype] + slack


@needs_compiler
@pytest.mark.parametrize(("num_heads", "head_dim", "value_dim"), [(1, 48, 32), (8, 40, 24), (16, 576, 512)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_may_be_the_first_part_of_keys(
    num_heads: int, head_dim: int, value_dim: int, dtype: str, use_amx: bool, three_threads: Any
) -> None:
    case = AttentionCase("latent", ((1, 1), (5, 40), (40, 90), (1, 700)), num_heads, 1, head_dim, 16)
    op = dataclasses.replace(case.op, value_dim=value_dim)
    inputs = make_inputs(case, dtype, "cpu")
    cache = dataclasses.replace(inputs.cache, v=inputs.cache.k[..., :value_dim])
    kernel = build(make_context(case, dtype, "cpu"), use_amx)
    assert kernel.label(op, dtype, PlainFormat()).startswith("CpuAttention")
    got = kernel.forward(kernel.prepare(inputs.batch), op, inputs.q, cache)
    want = paged_attention(inputs.batch, op, inputs.q, cache)
    slack = 2.0**-8 if dtype == "bfloat16" else 0.0
    assert error(got, want.double()) <= TOLERANCE[dtype] + slack


@needs_compiler
def test_queries_beyond_the_keys_are_an_error_here_not_in_the_kernel() -> None:
    inputs = make_inputs(case_named("whole_prompt"), "float32", "cpu")
    broken: AttentionBatch = dataclasses.replace(inputs.batch, kv_lens=(3,))
    with pytest.raises(AssertionError, match="new tokens are keys"):
        build(build_context()).prepare(broken)


def test_it_is_offered_where_kernels_can_be_built() -> None:
    model = build_context().model
    (no_gpu,) = only_compiling_cpus(model, DeviceFacts("cuda", features=frozenset({"cxx"})))
    assert no_gpu == "its kernels are for CPUs, not cuda"
    (no_compiler,) = only_compiling_cpus(model, DeviceFacts("cpu"))
    assert "needs a C++ compiler" in no_compiler
    assert only_compiling_cpus(model, DeviceFacts("cpu", features=frozenset({"cxx"}))) == ()
