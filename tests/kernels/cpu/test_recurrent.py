"""C++ and torch compute the same of recurrent ops, and leave the same in the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch
from engine.contracts.graph import Builder, Graph
from engine.contracts.ops import DeltaRule
from engine.kernels.backends import fused_block
from engine.kernels.context import StepContext
from engine.kernels.model import LoweredBlock, Step
from engine.kernels.settings import Kernels, Lowering
from engine.kv.cache import KVCache
from engine.kv.groups import cache_groups
from engine.testing.attention_cases import PlainFormat
from engine.testing.plain import PlainAttention
from tests.needs import needs_compiler

pytestmark = needs_compiler
BLOCK = 8
RULES = {
    "small": DeltaRule(2, 5, 4, 3, "rate", "bias"),
    "one head, wide": DeltaRule(1, 64, 1, 128, "rate", "bias"),
    "parallel": DeltaRule(8, 32, 16, 48, "rate", "bias"),
}
STEPS = (((0, 0, 13), (1, 0, 1), (2, 0, 24)), ((1, 1, 1), (0, 13, 4)), ((0, 15, 2), (2, 24, 1), (1, 2, 40)))
"""Of each row, in a step: the sequence, where its tokens begin, and how many they are; (0, 15): two were rejected."""
TABLES = ([9, 3, 14, 1], [2, 8, 5, 12, 4, 7], [6, 15, 11, 10, 13])


class RandomWeights:
    def small(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))


def network(rule: DeltaRule) -> Graph:
    b = Builder()
    keys, values = rule.num_key_heads * rule.key_dim, rule.num_heads * rule.value_dim
    q, k, v, write, decay = (b.input(size) for size in (keys, keys, values, rule.num_heads, rule.num_heads))
    with b.layer(q):
        b.delta_rule(*b.short_conv([q, k, v], "conv", 4, "silu"), write, decay, rule)
    return b.graph()


def computed(rule: DeltaRule, kernels: Kernels, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """What comes out of each step, and what is left in the cache."""
    graph, weights = network(rule), RandomWeights()
    lowering = Lowering("cpu", dtype, PlainAttention(), PlainFormat(), (), kernels)
    kv = KVCache(cache_groups(graph.caches), PlainFormat(), [16], BLOCK, "float32", "cpu")
    left = [tensor for state in kv.states.values() for tensor in (state.tokens, state.states)]
    for tensor in left:
        tensor.fill_(float("nan"))
    found = fused_block(graph.layers[0], lowering)
    assert len(found) == (1 if kernels == "native" else 2)
    loaded: Any = weights
    calls = [each.kernel.lower(lowering, each, loaded).call for each in found]
    block = LoweredBlock(tuple(Step(call, each.inputs, each.outputs, ()) for call, each in zip(calls, found)))
    made = []
    for number, rows in enumerate(STEPS):
        count, generator = sum(tokens for *_, tokens in rows), torch.Generator().manual_seed(number)
        # As views of wider rows, which projections of several parts make.
        values = {
            each: torch.randn(count, graph.sizes[each] + 9, generator=generator).to(dtype)[:, 4:-5]
            for each in graph.inputs
        }
        block.run(values, where(rows, kv))
        made.append(values[graph.layers[0].nodes[-1].outputs[0]])
    return made, left


def where(rows: tuple[tuple[int, int, int], ...], kv: KVCache) -> StepContext:
    ends = [start + count for _, start, count in rows]
    tables = torch.zeros(len(rows), 6, dtype=torch.int32)
    for row, (sequence, _, _) in enumerate(rows):
        tables[row, : len(TABLES[sequence])] = torch.tensor(TABLES[sequence])
    counts = tuple(count for *_, count in rows)
    lengths = torch.tensor([0, *counts]).cumsum(0).int(), torch.tensor(ends).int()
    batch = AttentionBatch(counts, tuple(ends), tables, *lengths, BLOCK)
    positions = torch.cat([torch.arange(start, end) for (_, start, _), end in zip(rows, ends)])
    slots = [TABLES[row][at // BLOCK] * BLOCK + at % BLOCK for row, start, n in rows for at in range(start, start + n)]
    return StepContext((), (torch.tensor(slots),), (None,), kv, positions, (batch,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_cpp_computes_what_torch_computes(name: str, dtype: torch.dtype) -> None:
    got, left = computed(RULES[name], "native", dtype)
    want, expected = computed(RULES[name], "torch", dtype)
    tolerance = {"atol": 2e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == dtype and ours.is_contiguous()
        torch.testing.assert_close(ours, theirs, **tolerance)
    for ours, theirs in zip(left, expected, strict=True):
        written = ours[1:].isfinite()  # block 0 is nobody's: torch writes what must go nowhere there
        assert torch.equal(written, theirs[1:].isfinite()), "the same is written"
        torch.testing.assert_close(ours[1:][written], theirs[1:][written], **tolerance)
