"""Before an engine on a GPU is ready it has run every kind of batch that requests can make."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from engine.kernels.triton.tiles import MOST_ROWS, skinny_tile
from engine.startup import warm_up
from engine.startup.warm_up import HEAD_ROWS, batch_shapes, warm_up_kernels, warm_up_sampling
from engine.step.tables import DeviceTables
from engine_plugins.attention_kernel.triton.planning import merge_shape, num_splits, plan_work, tile_shape

from ..laws.harness import assert_nothing_held, exact_engine, expected, random_requests, run


def launches(q_lens: tuple[int, ...], group: int, kv_heads: int, num_sms: int) -> set[tuple[object, ...]]:
    """What the Triton attention kernels are compiled for in a batch."""
    works = plan_work(
        q_lens, q_lens, group=group, num_kv_heads=kv_heads, head_dim=128, itemsize=2, num_sms=num_sms
    )  # fmt: skip
    found = set()
    for work in works:
        shape = tile_shape(work.split, work.block_m, 128, 2)
        splits = num_splits(len(work.tiles) * kv_heads, num_sms, work.queries) if work.split else 0
        merge = merge_shape(splits, shape.block_m, shape.block_d) if splits > 1 else None
        found.add((work.split, shape, splits > 1, merge))
    return found


def test_no_batch_needs_a_kernel_that_the_shapes_did_not() -> None:
    rng = random.Random(1)
    cases = itertools.product(((4, 8), (1, 32), (7, 2), (8, 1)), (58, 132), ((32, 2048, 4096), (4, 2048, 300)))
    for (group, kv_heads), num_sms, (max_requests, budget, max_len) in cases:
        warm = set()
        for rows, length in batch_shapes(max_requests, max_len, budget):
            warm |= launches((length,) * rows, group, kv_heads, num_sms)
        for _ in range(400):
            left, q_lens = budget, []
            for _ in range(rng.randint(1, max_requests)):
                wanted = rng.choice((1, 1, 3, 5, rng.randint(1, 16), rng.randint(1, 64), rng.randint(1, max_len)))
                if wanted <= left:
                    q_lens.append(wanted)
                    left -= wanted
            missing = launches(tuple(q_lens), group, kv_heads, num_sms) - warm
            assert not missing, (group, kv_heads, num_sms, max_requests, q_lens, missing)


@pytest.mark.parametrize("bits", [4, 8])
def test_no_number_of_rows_needs_a_tile_that_the_heads_rows_did_not(bits: int) -> None:
    """Of a head of packed weights; the layers have the rows of ``batch_shapes``."""
    shapes = [rows * length for rows, length in batch_shapes(32, 4096, 2048)]
    for warm in (HEAD_ROWS, shapes):
        tiles = {skinny_tile(rows, 128256, 4096, 132, bits) for rows in warm if rows <= MOST_ROWS}
        assert {skinny_tile(rows, 128256, 4096, 132, bits) for rows in range(1, MOST_ROWS + 1)} == tiles
        assert max(warm) > MOST_ROWS


def test_large_batches_run_through_a_layer_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, apart = list[int](), list[tuple[int, ...]]()
    model = SimpleNamespace(
        layers=(1, 2, 1), layers_of_each_kind=(1, 2),
        run_apart=lambda layers, batch, kv: apart.append((len(batch.token_ids), *layers)),
    )  # fmt: skip
    runner: Any = SimpleNamespace(
        model=model, tables=DeviceTables(3, 64, 0, 8, "cpu", 96), kv=None, samples=False, is_alone=True,
        forward=lambda batch: (whole.append(len(batch.token_ids)), None),
    )  # fmt: skip
    monkeypatch.setattr(warm_up, "WHOLE_TOKENS", 16)
    warm_up_kernels(runner, 64, 40)
    shapes = [rows * length for rows, length in batch_shapes(3, 64, 40)]
    assert whole == [tokens for tokens in shapes if tokens <= 16]
    assert apart == [(tokens, 1, 2) for tokens in shapes if tokens > 16] and apart
    whole.clear()
    runner.is_alone = False
    warm_up_kernels(runner, 64, 40)
    assert whole == shapes


def test_warming_up_leaves_nothing_after() -> None:
    engine = exact_engine("drafter=none", "scheduler.max_requests=3", "scheduler.token_budget=40", max_len=64)
    warm_up_kernels(engine.runner, 64, 40)
    warm_up_sampling(engine.core, 64, 40)
    assert_nothing_held(engine)
    requests = random_requests(4, 6, longest=20)
    assert run(engine.core, requests) == {r.request_id: expected(r) for r in requests}
    engine.core.close()
