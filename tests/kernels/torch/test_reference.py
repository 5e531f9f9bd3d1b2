"""The reference that every attention kernel is compared with, against its definition: one mask, one query at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.kernels.torch.reference import paged_attention, paged_attention_lse
from engine.testing.attention_cases import (
    FORMATS,
    SMALL_CASES,
    TOLERANCE,
    AttentionCase,
    AttentionInputs,
    error,
    make_inputs,
    of_rank,
)


def keys_and_values(inputs: AttentionInputs, row: int, count: int) -> tuple[Tensor, Tensor]:
    """float64 ``[count, kv_heads, dim]``, token by token."""
    batch, cache = inputs.batch, inputs.cache

    def read(stored: Tensor, scale: Tensor | None, token: int) -> Tensor:
        at = int(batch.block_tables[row, token // batch.block_size]), token % batch.block_size
        own = scale[at][None] if scale is not None and scale.dim() > 1 else scale
        return cache.format.unpack(stored[at][None], own, torch.float32)[0].double()

    pairs = ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
    keys, values = (torch.stack([read(*pair, token) for token in range(count)]) for pair in pairs)
    return keys, values


def defined(case: AttentionCase, inputs: AttentionInputs) -> Tensor:
    found, first = [], 0
    for row, (q_len, kv_len) in enumerate(case.rows):
        keys, values = keys_and_values(inputs, row, kv_len)
        for i in range(q_len):
            position = kv_len - q_len + i
            seen = [
                key
                for key in range(position + 1)
                if (case.window is None or key > position - case.window)
                and (case.chunk is None or key // case.chunk == position // case.chunk)
            ]
            found.append(attended(case, inputs, inputs.q[first + i].double(), keys[seen], values[seen]))
        first += q_len
    return torch.stack(found)


def attended(case: AttentionCase, inputs: AttentionInputs, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    group, scale = case.num_heads // case.num_kv_heads, case.scale or 1.0 / math.sqrt(case.head_dim)
    heads = []
    for head in range(case.num_heads):
        scores = keys[:, head // group] @ q[head] * scale
        if case.soft_cap is not None:
            scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
        weights = scores.exp()
        total = weights.sum() + (0.0 if inputs.sinks is None else inputs.sinks[head].double().exp())
        heads.append(weights @ values[:, head // group] / total)
    return torch.cat(heads)


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
def test_paged_attention_equals_its_definition(case: AttentionCase) -> None:
    inputs = make_inputs(case, "float32", "cpu")
    want, asked = defined(case, inputs), (inputs.batch, case.op, inputs.q, inputs.cache, *inputs.more)
    assert error(paged_attention(*asked), want) <= TOLERANCE["float32"]
    assert error(paged_attention(*asked, exact=True), want) <= 1e-12


@pytest.mark.parametrize("stored", FORMATS)
def test_what_a_format_stores_is_unpacked_with_its_scales(stored: str) -> None:
    case = next(case for case in SMALL_CASES if case.name == "prefill_decode_verify")
    inputs = make_inputs(case, "float32", "cpu", FORMATS[stored])
    got = paged_attention(inputs.batch, case.op, inputs.q, inputs.cache, exact=True)
    assert error(got, defined(case, inputs)) <= 1e-12


@pytest.mark.parametrize(("ranks", "index"), [(2, 0), (3, 1)])
def test_the_keys_of_one_rank_and_their_log_sum_exp(ranks: int, index: int) -> None:
    case = next(case for case in SMALL_CASES if case.name == "prefill_decode_verify")
    inputs = of_rank(case, make_inputs(case, "float32", "cpu"), ranks, index)
    out, lse = paged_attention_lse(inputs.batch, case.op, inputs.q, inputs.cache, exact=True)
    ends, group = inputs.batch.key_ends, case.num_heads // case.num_kv_heads
    assert ends is not None
    rows = [row for row, (q_len, _) in enumerate(case.rows) for _ in range(q_len)]
    for query, (row, end) in enumerate(zip(rows, ends.tolist(), strict=True)):
        if not end:
            assert not out[query].any() and bool((lse[query] == float("-inf")).all())
            continue
        keys, values = keys_and_values(inputs, row, end)
        q = inputs.q[query].double()
        assert error(out[query], attended(case, inputs, q, keys, values)) <= 1e-12
        scores = torch.stack([keys[:, head // group] @ q[head] for head in range(case.num_heads)]) * case.op.scale
        assert error(lse[query], scores.exp().sum(dim=1).log()) <= 1e-12
