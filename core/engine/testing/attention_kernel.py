"""Conformance suite for attention kernels: derive a test class, say how to make yours, and run pytest.

.. code-block:: python

    class TestMine(AttentionKernelConformance):
        device = "cuda"
        capabilities = Mine.capabilities  # no cases of what the kernel does not claim

        def make(self, context):
            return Mine(MineConfig(), context)

A capturable kernel inherits :class:`CapturableConformance` instead.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.contracts.attention_kernel import AttentionBatch, AttentionCapabilities, AttentionKernel, NativeAttention
from engine.contracts.provider import BuildContext
from engine.testing.attention_cases import (
    SMALL_CASES,
    TOLERANCE,
    AttentionCase,
    PlainFormat,
    case_named,
    error,
    make_context,
    make_inputs,
    measure,
    reference,
    run,
)

SIXTEEN_BIT_CASES = (
    "prefill_decode_verify", "chunk_with_history", "chunk_window", "group_7", "head_dim_80", "soft_cap_and_window",
)  # fmt: skip
"""Every case runs in float32, these in the 16-bit dtypes, too."""


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
                if (dtype == "float32" or case.name in SIXTEEN_BIT_CASES) and self.claims(case)
            ]
            metafunc.parametrize(("case", "dtype"), cases)

    def claims(self, case: AttentionCase) -> bool:
        able = self.capabilities
        return (
            (able.head_dims is None or case.head_dim in able.head_dims)
            and (able.window or case.window is None)
            and (able.soft_cap or case.soft_cap is None)
        )

    def test_the_suites_of_all_that_the_kernel_offers_are_inherited(self) -> None:
        kernel = self.make(make_context(case_named("verify"), "float32", self.device))
        assert kernel.capabilities.capturable == isinstance(self, CapturableConformance)
        assert isinstance(kernel, NativeAttention) == isinstance(self, NativeConformance)

    def test_the_plan_can_say_what_computes_it(self) -> None:
        case = case_named("verify")
        label = self.make(make_context(case, "float32", self.device)).label(case.op, "float32", PlainFormat())
        assert label and "\n" not in label

    def test_equals_the_reference(self, case: AttentionCase, dtype: str) -> None:
        worst = measure(self.make, case, dtype, self.device)
        assert worst <= TOLERANCE[dtype], f"error {worst:.2e}"

    def test_rows_without_queries_are_harmless(self) -> None:
        case = case_named("verify")
        inputs = make_inputs(case, "float32", self.device, padding_rows=3)
        got = run(self.make(make_context(case, "float32", self.device)), case, inputs)
        assert error(got, reference(case, inputs)) <= TOLERANCE["float32"]

    def test_lengths_on_the_host_are_bounds(self) -> None:
        """While drafts are verified the host does not know how many are accepted."""
        case = case_named("verify")
        inputs = make_inputs(case, "float32", self.device)
        bounds = tuple(kv_len + 3 for _, kv_len in case.rows)
        got = run(
            self.make(make_context(case, "float32", self.device)),
            case,
            replace(inputs, batch=replace(inputs.batch, kv_lens=bounds)),
        )
        assert error(got, reference(case, inputs)) <= TOLERANCE["float32"]

    def test_the_same_call_gives_the_same_bits(self) -> None:
        case = case_named("prefill_decode_verify")
        inputs = make_inputs(case, "float32", self.device)
        kernel = self.make(make_context(case, "float32", self.device))
        assert torch.equal(run(kernel, case, inputs), run(kernel, case, inputs))


class CapturableConformance(AttentionKernelConformance):
    """For kernels that claim to be capturable."""

    def test_a_captured_call_takes_its_lengths_from_the_device(self) -> None:
        """A graph captured at ``prepare`` time is replayed with fewer queries per row and longer contexts."""
        case = case_named("verify")
        kernel = self.make(make_context(case, "float32", self.device))
        inputs = make_inputs(case, "float32", self.device)
        widest = tuple(8 for _ in case.rows)
        captured = replace(inputs, batch=replace(inputs.batch, q_lens=widest, kv_lens=widest))
        got = run(kernel, case, captured)
        assert error(got, reference(case, inputs)) <= TOLERANCE["float32"]


class NativeConformance(AttentionKernelConformance):
    """For kernels whose layers are native calls (:class:`~engine.contracts.attention_kernel.NativeAttention`)."""

    @pytest.mark.parametrize("native_dtype", ["float32", "bfloat16"])
    def test_a_native_call_computes_what_is_there_when_it_is_made(self, native_dtype: str) -> None:
        """Described before queries, lengths and block tables are known; rows without queries follow."""
        case = case_named("verify")
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
