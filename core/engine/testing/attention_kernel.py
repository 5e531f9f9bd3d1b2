"""Conformance suite for attention kernels: derive a test class, say how to make yours, and run pytest.

.. code-block:: python

    class TestMine(AttentionKernelConformance):
        device = "cuda"
        capabilities = Mine.capabilities  # no cases of what the kernel does not claim

        def make(self, context):
            return Mine(MineConfig(), context)

A capturable kernel inherits :class:`CapturableConformance` instead, one with native calls :class:`NativeConformance`,
one that can attend to the keys of one rank :class:`LogSumExpConformance`; several of them where it is several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from engine.contracts.attention_kernel import (
    AttentionBatch,
    AttentionCapabilities,
    AttentionKernel,
    LogSumExpAttention,
    NativeAttention,
    SinkAttention,
)
from engine.contracts.kv_allocator import KVGroup
from engine.contracts.provider import BuildContext
from engine.plugin_guard.calls import lacking
from engine.testing.attention_cases import (
    FORMATS,
    SMALL_CASES,
    TOLERANCE,
    AttentionCase,
    AttentionInputs,
    PlainFormat,
    case_named,
    error,
    forward,
    make_context,
    make_inputs,
    measure,
    of_rank,
    reference,
    reference_lse,
    run,
)
from engine.testing.no_sync import NoSync
from engine.testing.subject import Subject, Suite, filled

SIXTEEN_BIT_CASES = (
    "prefill_decode_verify", "chunk_with_history", "chunk_window", "group_7", "head_dim_80", "soft_cap_and_window",
    "chunked", "sinks", "latent",
)  # fmt: skip
"""Every case runs in float32, these in the 16-bit dtypes, too."""
STORED_CASES = ("verify", "prefill_decode_verify", "group_3")
"""These run with keys and values that are stored in fewer bits."""
SHARED_CASES = (
    "one_token", "decode_at_block_borders", "decode_of_very_unequal_lengths", "verify", "verify_wide", "whole_prompt",
    "prefill_decode_verify", "chunk_with_history", "chunk_soft_cap", "group_7", "scale", "latent", "latent_chunk",
)  # fmt: skip
"""These run on ranks that share out tokens."""


class AttentionKernelConformance:
    """Inherit, say the capabilities, implement :meth:`make`, and pytest runs every case that the kernel claims."""

    device = "cpu"
    capabilities: AttentionCapabilities

    def make(self, context: BuildContext) -> AttentionKernel:
        """Build the kernel under test."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self, context)")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Cases of what the kernel claims, and no others."""
        if "case" in metafunc.fixturenames:
            cases = [
                pytest.param(case, dtype, id=f"{case.name}-{dtype}")
                for dtype in self.capabilities.dtypes
                for case in SMALL_CASES
                if (dtype == self.dtype or case.name in SIXTEEN_BIT_CASES) and self.claims(case)
            ]
            metafunc.parametrize(("case", "dtype"), cases)
        if "stored_case" in metafunc.fixturenames:
            names: tuple[str, ...] = (*STORED_CASES, *(["latent"] if self.capabilities.latent else []))
            metafunc.parametrize("stored_case", list(map(self.fitted, names)), ids=names)
        if "shared_case" in metafunc.fixturenames:
            found = [case for name in SHARED_CASES if self.claims(case := self.fitted(name))]
            metafunc.parametrize("shared_case", found, ids=[case.name for case in found])

    def claims(self, case: AttentionCase) -> bool:
        able = self.capabilities
        return (
            (able.head_dims is None or case.value_dim is not None or case.head_dim in able.head_dims)
            and able.heads_per_kv_head in (None, case.num_heads // case.num_kv_heads)
            and (able.window or case.window is None)
            and (able.soft_cap or case.soft_cap is None)
            and (able.chunk or case.chunk is None)
            and (able.sinks or not case.sinks)
            and (able.latent or case.value_dim is None)
        )

    @property
    def dtype(self) -> str:
        """The compute dtype in which errors are smallest."""
        return "float32" if "float32" in self.capabilities.dtypes else self.capabilities.dtypes[0]

    def fitted(self, name: str) -> AttentionCase:
        """A case with heads that the kernel claims."""
        case, able = case_named(name), self.capabilities
        if case.value_dim is not None:
            return case
        dims = (case.head_dim,) if able.head_dims is None else able.head_dims
        group = able.heads_per_kv_head or case.num_heads // case.num_kv_heads
        head_dim = case.head_dim if case.head_dim in dims else dims[0]
        return replace(case, head_dim=head_dim, num_heads=group * case.num_kv_heads)

    def built(self, case: AttentionCase) -> AttentionKernel:
        return self.make(make_context(case, self.dtype, self.device))

    def check(self, got: Tensor, case: AttentionCase, inputs: AttentionInputs, what: str = "") -> None:
        worst = error(got, reference(case, inputs))
        assert worst <= TOLERANCE[self.dtype], f"{what or case.name}: error {worst:.2e}"

    def test_the_suites_of_all_that_the_kernel_offers_are_inherited(self) -> None:
        case = self.fitted("verify")
        kernel, said = self.built(case), self.capabilities
        assert isinstance(kernel, AttentionKernel), lacking(kernel, AttentionKernel)
        able = kernel.capabilities
        assert able.head_dims is None or case.head_dim in able.head_dims
        for what in ("dtypes", "window", "chunk", "soft_cap", "sinks", "latent"):
            assert getattr(able, what) == getattr(said, what), f"no cases of {what}"
        assert not able.sinks or isinstance(kernel, SinkAttention)
        assert able.capturable == isinstance(self, CapturableConformance)
        assert isinstance(kernel, NativeAttention) == isinstance(self, NativeConformance)
        assert isinstance(kernel, LogSumExpAttention) == isinstance(self, LogSumExpConformance)

    def test_the_plan_can_say_what_computes_it(self) -> None:
        case = self.fitted("verify")
        for kv_format in (PlainFormat(), *FORMATS.values()):
            label = self.built(case).label(case.op, self.dtype, kv_format)
            assert label and "\n" not in label

    def test_equals_the_reference(self, case: AttentionCase, dtype: str) -> None:
        worst = measure(self.make, case, dtype, self.device)
        assert worst <= TOLERANCE[dtype], f"error {worst:.2e}"

    @pytest.mark.parametrize("stored", FORMATS)
    def test_reads_what_a_format_stores(self, stored_case: AttentionCase, stored: str) -> None:
        """With scales of keys that are not those of values, for heads and tokens that differ."""
        worst = measure(self.make, stored_case, self.dtype, self.device, FORMATS[stored])
        # In 16 bits keys and values are rounded once more where they are read.
        assert worst <= TOLERANCE[self.dtype] * (1 if self.dtype == "float32" else 2), f"error {worst:.2e}"

    def test_rows_without_queries_are_harmless(self) -> None:
        case = self.fitted("verify")
        inputs = make_inputs(case, self.dtype, self.device, padding_rows=3)
        self.check(run(self.built(case), case, inputs), case, inputs)

    def test_lengths_on_the_host_are_bounds(self) -> None:
        """While drafts are verified the host does not know how many are accepted."""
        case = self.fitted("verify")
        inputs = make_inputs(case, self.dtype, self.device)
        self.check(run(self.built(case), case, inputs.with_bounds(3)), case, inputs)

    def test_blocks_that_a_window_has_passed_are_not_read(self) -> None:
        """They are padding, or another request's by now: whatever is there, also what a broken one left."""
        for name in ("window", "chunk_window", "window_of_one", "chunked"):
            case = self.fitted(name)
            if not self.claims(case):
                continue
            inputs = make_inputs(case, self.dtype, self.device)
            tables = inputs.batch.block_tables.clone()
            kind: Literal["window", "chunked"] = "window" if case.window else "chunked"
            group = KVGroup(0, (0,), kind, 0, 2, case.window or case.chunk)
            for row, (q_len, kv_len) in enumerate(case.rows):
                tables[row, : group.num_passed(kv_len - q_len, case.block_size)] = 0
            inputs.cache.k[0], inputs.cache.v[0] = float("nan"), float("nan")
            got = run(self.built(case), case, replace(inputs, batch=replace(inputs.batch, block_tables=tables)))
            self.check(got, case, inputs)

    def test_the_same_call_gives_the_same_bits(self) -> None:
        case = self.fitted("prefill_decode_verify")
        inputs = make_inputs(case, self.dtype, self.device)
        kernel = self.built(case)
        assert torch.equal(run(kernel, case, inputs), run(kernel, case, inputs))

    def test_queries_may_be_a_view_of_a_fused_projection(self) -> None:
        case = self.fitted("prefill_decode_verify")
        inputs = make_inputs(case, self.dtype, self.device)
        fused = inputs.in_projection(case.num_kv_heads, beside=float("nan"))
        self.check(run(self.built(case), case, fused), case, inputs)

    def test_it_only_reads(self) -> None:
        case = self.fitted("verify")
        inputs = make_inputs(case, self.dtype, self.device, FORMATS["int8_per_token_head"])
        batch, cache = inputs.batch, inputs.cache
        assert cache.k_scale is not None and cache.v_scale is not None
        read = {
            "queries": inputs.q, "keys": cache.k, "values": cache.v, "key scales": cache.k_scale.view(torch.int32),
            "value scales": cache.v_scale.view(torch.int32), "block tables": batch.block_tables,
            "starts of queries": batch.q_starts, "lengths": batch.kv_lens_device,
        }  # fmt: skip
        before = {name: tensor.clone() for name, tensor in read.items()}
        run(self.built(case), case, inputs)
        assert [name for name, tensor in read.items() if not torch.equal(tensor, before[name])] == []

    def test_layers_share_what_was_prepared(self) -> None:
        """Each has its own cache, and perhaps its own window, chunk and scale; the first one runs again at the end."""
        case, able = self.fitted("prefill_decode_verify"), self.capabilities
        changed = [replace(case, scale=0.5), replace(case, window=7 if able.window else None)]
        changed.append(replace(case, chunk=7 if able.chunk else None))
        layers = [case, *(replace(one, name=f"{case.name}, layer {i}") for i, one in enumerate(changed)), case]
        batch, kernel = make_inputs(case, self.dtype, self.device).batch, self.built(case)
        prepared = kernel.prepare(batch)
        for layer in layers:
            inputs = make_inputs(layer, self.dtype, self.device, tables_of=case)
            assert torch.equal(inputs.batch.block_tables, batch.block_tables)
            self.check(forward(kernel, prepared, layer, inputs), layer, inputs, layer.name)

    def test_batches_are_prepared_before_others_ran(self) -> None:
        """What one batch left behind, in whatever order, does not show in another."""
        cases = [self.fitted(name) for name in ("verify", "one_token", "prompt_chunk")]
        kernel = self.built(cases[0])
        steps = [(case, make_inputs(case, self.dtype, self.device)) for case in (*cases, *reversed(cases))]
        prepared = [kernel.prepare(inputs.batch) for _, inputs in steps]
        for (case, inputs), what in zip(steps, prepared, strict=True):
            self.check(forward(kernel, what, case, inputs), case, inputs)


class CapturableConformance(AttentionKernelConformance):
    """For kernels that claim to be capturable."""

    @pytest.mark.parametrize("name", ["verify", "chunk_with_history"])
    def test_a_captured_call_takes_its_lengths_from_the_device(self, name: str) -> None:
        """A graph captured at ``prepare`` time is replayed with longer contexts, and decode steps with fewer queries
        per row."""
        case = self.fitted(name)
        inputs = make_inputs(case, self.dtype, self.device)
        widest = tuple(max(8, count) for count in inputs.batch.q_lens)
        captured = replace(inputs, batch=replace(inputs.batch, q_lens=widest, kv_lens=widest))
        self.check(run(self.built(case), case, captured), case, inputs)

    @pytest.mark.parametrize("name", ["verify", "chunk_with_history"])
    def test_a_captured_call_asks_nothing_of_the_host(self, name: str) -> None:
        """What a capture on a GPU would refuse is refused here, too: no host reads, no uploads."""
        case = self.fitted(name)
        inputs, kernel = make_inputs(case, self.dtype, self.device), self.built(case)
        prepared = kernel.prepare(inputs.batch)
        forward(kernel, prepared, case, inputs)
        with NoSync():  # type: ignore[no-untyped-call]
            got = forward(kernel, prepared, case, inputs)
        self.check(got, case, inputs)


class NativeConformance(AttentionKernelConformance):
    """For kernels whose layers are native calls (:class:`~engine.contracts.attention_kernel.NativeAttention`)."""

    @pytest.mark.parametrize("native_dtype", ["float32", "bfloat16"])
    def test_a_native_call_computes_what_is_there_when_it_is_made(self, native_dtype: str) -> None:
        """Described before queries, lengths and block tables are known; rows without queries follow."""
        case = self.fitted("verify")
        kernel = self.make(make_context(case, native_dtype, self.device))
        assert isinstance(kernel, NativeAttention)
        real = make_inputs(case, native_dtype, self.device, padding_rows=3)
        tensors = (real.batch.block_tables, real.batch.q_starts, real.batch.kv_lens_device, real.q)
        tables, q_starts, kv_lens, q = (torch.zeros_like(tensor) for tensor in tensors)
        ones = (1,) * len(real.batch.q_lens)
        batch = AttentionBatch(ones, ones, tables, q_starts, kv_lens, real.batch.block_size)
        prepared, out = kernel.prepare(batch), q.new_empty(q.shape[0], case.num_heads * case.head_dim)
        call = kernel.call(prepared, case.op, q, real.cache, out)
        assert call is not None
        for later, value in zip((tables, q_starts, kv_lens, q), tensors, strict=True):
            later.copy_(value)
        call()
        assert torch.equal(out, run(kernel, case, real))


class LogSumExpConformance(AttentionKernelConformance):
    """For kernels that can attend to the keys of one rank (:class:`LogSumExpAttention`)."""

    @pytest.mark.parametrize(("ranks", "index"), [(2, 0), (2, 1), (3, 1)])
    def test_attends_to_the_keys_of_one_rank(self, shared_case: AttentionCase, ranks: int, index: int) -> None:
        self.check_lse(shared_case, self.dtype, ranks, index)

    def test_attends_to_the_keys_of_one_rank_in_every_dtype(self) -> None:
        for dtype in self.capabilities.dtypes:
            self.check_lse(self.fitted("prefill_decode_verify"), dtype, 2, 1)

    @pytest.mark.parametrize("stored", FORMATS)
    def test_attends_to_what_a_format_stores_on_one_rank(self, stored: str) -> None:
        self.check_lse(self.fitted("prefill_decode_verify"), self.dtype, 2, 1, stored)

    def test_the_keys_of_one_rank_are_attended_to_in_every_layer(self) -> None:
        """Layers share what was prepared, and batches may be prepared before others ran."""
        cases = [self.fitted("verify"), self.fitted("prefill_decode_verify")]
        kernel = self.built(cases[0])
        assert isinstance(kernel, LogSumExpAttention)
        inputs = [of_rank(case, make_inputs(case, self.dtype, self.device), 2, 1) for case in cases]
        prepared = [kernel.prepare(one.batch) for one in inputs]
        for _ in range(2):
            for case, one, what in zip(cases, inputs, prepared, strict=True):
                self.same_lse(case, one, *kernel.forward_lse(what, case.op, one.q, one.cache), self.dtype)

    def check_lse(self, case: AttentionCase, dtype: str, ranks: int, index: int, stored: str | None = None) -> None:
        kernel = self.make(make_context(case, dtype, self.device))
        assert isinstance(kernel, LogSumExpAttention)
        kv_format = None if stored is None else FORMATS[stored]
        inputs = of_rank(case, make_inputs(case, dtype, self.device, kv_format), ranks, index)
        got = kernel.forward_lse(kernel.prepare(inputs.batch), case.op, inputs.q, inputs.cache)
        self.same_lse(case, inputs, *got, dtype)

    def same_lse(self, case: AttentionCase, inputs: AttentionInputs, out: Tensor, lse: Tensor, dtype: str) -> None:
        want, sums = reference_lse(case, inputs)
        assert out.shape == want.shape and out.dtype == inputs.q.dtype and out.is_contiguous()
        assert lse.shape == sums.shape and lse.dtype == torch.float32
        none = sums == float("-inf")
        assert torch.equal(lse.cpu() == float("-inf"), none), "of a query that sees no key, and of no other, it is -inf"
        if none.all():
            return
        worst = error(lse.cpu()[~none], sums[~none])
        assert worst <= TOLERANCE[dtype], f"natural log-sum-exp: error {worst:.2e}"
        each = out.cpu().view(*sums.shape, -1)[~none], want.view(*sums.shape, -1)[~none]
        assert error(*each) <= TOLERANCE[dtype], f"output: error {error(*each):.2e}"


def suite_for(subject: Subject) -> Suite:
    """For ``engine plugins check``: of what the kernel offers."""
    kernel = subject.build(make_context(case_named("verify"), "float32", subject.device))
    offered = {
        CapturableConformance: kernel.capabilities.capturable,
        NativeConformance: isinstance(kernel, NativeAttention),
        LogSumExpConformance: isinstance(kernel, LogSumExpAttention),
    }
    chosen = [suite for suite, offers in offered.items() if offers] or [AttentionKernelConformance]
    make: Callable[[Any, BuildContext], Any] = lambda self, context: subject.build(context)  # noqa: E731
    return filled(subject, chosen, make=make, capabilities=kernel.capabilities)
