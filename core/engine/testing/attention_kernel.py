"""Conformance suite for attention kernels: derive a test class, say how to make yours, and run pytest.

.. code-block:: python

    class TestMine(AttentionKernelConformance):
        device = "cuda"

        def make(self, context):
            return Mine(MineConfig(), context)
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.contracts.attention_kernel import AttentionBatch, AttentionKernel, NativeAttention
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


class AttentionKernelConformance:
    """Inherit, implement :meth:`make`, and pytest runs every case."""

    device = "cpu"
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")

    def make(self, context: BuildContext) -> AttentionKernel:
        """Build the kernel under test."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self, context)")

    def skip_unless_able(self, kernel: AttentionKernel, case: AttentionCase, dtype: str) -> None:
        """Skip what the kernel does not claim to do."""
        able = kernel.capabilities
        wanted = {
            "head_dim": able.head_dims is None or case.head_dim in able.head_dims,
            "dtype": dtype in able.dtypes and dtype in self.dtypes,
            "window": able.window or case.window is None,
            "soft_cap": able.soft_cap or case.soft_cap is None,
        }
        missing = [name for name, able_to in wanted.items() if not able_to]
        if missing:
            pytest.skip(f"the kernel does not claim {', '.join(missing)}")

    def check(self, case: AttentionCase, dtype: str) -> None:
        self.skip_unless_able(self.make(make_context(case, dtype, self.device)), case, dtype)
        worst = measure(self.make, case, dtype, self.device)
        assert worst <= TOLERANCE[dtype], f"{case.name} {dtype}: error {worst:.2e}"

    def test_the_plan_can_say_what_computes_it(self) -> None:
        case = case_named("verify")
        label = self.make(make_context(case, "float32", self.device)).label(case.op, "float32", PlainFormat())
        assert label and "\n" not in label

    @pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
    def test_equals_the_reference_in_float32(self, case: AttentionCase) -> None:
        self.check(case, "float32")

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("name", list(SIXTEEN_BIT_CASES))
    def test_rounds_once_in_16_bit(self, name: str, dtype: str) -> None:
        self.check(case_named(name), dtype)

    def test_rows_without_queries_are_harmless(self) -> None:
        case = case_named("verify")
        inputs = make_inputs(case, "float32", self.device, padding_rows=3)
        got = run(self.make(make_context(case, "float32", self.device)), case, inputs)
        assert error(got, reference(case, inputs)) <= TOLERANCE["float32"]

    def test_a_recorded_call_takes_its_lengths_from_the_device(self) -> None:
        """A graph captured at ``stage`` time is replayed with fewer queries per row and longer contexts."""
        case = case_named("verify")
        kernel = self.make(make_context(case, "float32", self.device))
        if not kernel.capabilities.recordable:
            pytest.skip("the kernel is not recordable")
        inputs = make_inputs(case, "float32", self.device)
        widest = tuple(8 for _ in case.rows)
        captured = replace(inputs, batch=replace(inputs.batch, q_lens=widest, kv_lens=widest))
        got = run(kernel, case, captured)
        assert error(got, reference(case, inputs)) <= TOLERANCE["float32"]

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_native_call_computes_what_is_there_when_it_is_made(self, dtype: str) -> None:
        """Described before queries, lengths and block tables are known; rows without queries follow."""
        case = case_named("verify")
        kernel = self.make(make_context(case, dtype, self.device))
        if not isinstance(kernel, NativeAttention) or dtype not in self.dtypes:
            pytest.skip("the kernel has no native calls")
        real = make_inputs(case, dtype, self.device, padding_rows=3)
        tensors = (real.batch.block_tables, real.batch.q_starts, real.batch.kv_lens_device, real.q)
        tables, q_starts, kv_lens, q = (torch.zeros_like(tensor) for tensor in tensors)
        ones = (1,) * len(real.batch.q_lens)
        batch = AttentionBatch(ones, ones, tables, q_starts, kv_lens, real.batch.block_size)
        staged, out = kernel.stage(batch), q.new_empty(q.shape[0], case.num_heads * case.head_dim)
        call = kernel.call(staged, case.op, q, real.k_cache, real.v_cache, PlainFormat(), None, None, out)
        assert call is not None
        for later, value in zip((tables, q_starts, kv_lens, q), tensors):
            later.copy_(value)
        call()
        assert torch.equal(out, run(kernel, case, real))

    def test_the_same_call_gives_the_same_bits(self) -> None:
        case = case_named("prefill_decode_verify")
        inputs = make_inputs(case, "float32", self.device)
        kernel = self.make(make_context(case, "float32", self.device))
        assert torch.equal(run(kernel, case, inputs), run(kernel, case, inputs))
