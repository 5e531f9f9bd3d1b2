"""Recorded steps: which shapes, in which order, for which rows; and nothing in a recording waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch
from engine.contracts.request import SamplingParams
from engine.execution.graphs import Bucket, StepGraphs, query_buckets, row_buckets
from engine.execution.model import LoweredModel, LoweredOp, StepContext
from engine.execution.runner import ModelRunner
from engine.execution.step import Admit, StepPlan, StepRow
from engine.execution.tables import UNWRITTEN, DeviceTables
from engine.execution.triton_ops.device import runs_triton
from engine.testing.no_sync import NoSync

VOCAB, HIDDEN, BLOCK = 11, 8, 4


def model() -> LoweredModel:
    """Embeds and projects; its one layer keeps what it is handed in the "cache"."""
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))

    def layer(residual: Tensor, carry: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        context.kv[context.slot_mapping] = residual[:, 0]  # type: ignore[index]
        return residual, carry

    ops: tuple[LoweredOp, ...] = (layer,)
    return LoweredModel(
        embed=lambda ids: torch.nn.functional.embedding(ids, table),
        layers=(ops,),
        project=lambda hidden: hidden @ table.T,
        unembed=lambda normed: normed @ table.T,
        rotate=lambda positions: (),
        attention=Stageable(),  # type: ignore[arg-type]
        lowering=(),
        weights_bytes=0,
    )


class Stageable:
    def stage(self, batch: AttentionBatch) -> AttentionBatch:
        return batch


class Recorder:
    """Stands in for CUDA graphs: replays by running again, and remembers the order."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        step()

        def replay() -> None:
            self.replayed += 1
            with NoSync():
                step()

        return replay


def row(slot: int, start: int, drafts: tuple[int, ...] = (), num_tokens: int = 1, samples: bool = True) -> StepRow:
    return StepRow(slot, start, num_tokens, drafts, samples, 0, 0, ())


def make(buckets: list[Bucket], slots: int = 4) -> tuple[StepGraphs, DeviceTables, Tensor, Recorder]:
    tables = DeviceTables(slots, max_len=24, max_draft_width=3, block_size=BLOCK, device="cpu")
    cache, recorder = torch.full((32 * BLOCK,), float("nan")), Recorder()
    graphs = StepGraphs(model(), cache, tables, (0,), buckets, recorder)  # type: ignore[arg-type]
    graphs.capture()
    return graphs, tables, cache, recorder


def admit(tables: DeviceTables, slot: int, tokens: tuple[int, ...], blocks: tuple[int, ...]) -> None:
    plan = StepPlan(
        0,
        (Admit(slot, tokens, len(tokens), SamplingParams(), 0, ()),),
        (StepRow(slot, 0, len(tokens), (), True, 0, 0, blocks),),
    )
    tables.apply(plan)


def test_buckets_grow_with_the_batch_and_always_hold_the_largest() -> None:
    assert row_buckets(1) == (1,)
    assert row_buckets(6) == (1, 2, 4, 6)
    assert row_buckets(32) == (1, 2, 4, 8, 16, 24, 32)
    for most in range(1, 200):
        sizes = row_buckets(most)
        assert sizes[-1] == most
        assert all(big <= max(2 * small, small + 16) for small, big in pairwise(sizes))
    assert query_buckets(0) == (1,)
    assert query_buckets(4) == (1, 2, 4, 5)


def test_a_batch_takes_the_smallest_graph_that_holds_it() -> None:
    graphs, *_ = make([Bucket(rows, queries) for rows in (1, 2, 4) for queries in (1, 4)])
    assert graphs.find([row(0, 3)]) == Bucket(1, 1)
    assert graphs.find([row(0, 3), row(1, 3), row(2, 3)]) == Bucket(4, 1)
    assert graphs.find([row(0, 3, (1, 2)), row(1, 3)]) == Bucket(2, 4)
    assert graphs.find([row(i, 3) for i in range(5)]) is None
    assert graphs.find([row(0, 3, (1, 2, 3, 4))]) is None
    assert graphs.find([row(0, 0, num_tokens=5)]) is None, "a prompt is not a decode step"
    assert graphs.find([row(0, 0, samples=False)]) is None
    assert graphs.find([]) is None


def test_the_largest_is_captured_first_and_nothing_once_ready() -> None:
    order: list[str] = []
    tables = DeviceTables(4, 24, 3, BLOCK, "cpu")
    recorder = Recorder()
    cache = torch.zeros(32 * BLOCK)
    buckets = [Bucket(1, 1), Bucket(4, 4), Bucket(2, 1), Bucket(4, 1)]
    graphs = StepGraphs(model(), cache, tables, (), buckets, recorder)  # type: ignore[arg-type]
    graphs.capture(lambda fraction, what: order.append(what))
    assert order == ["4 x 4", "4 x 1", "2 x 1", "1 x 1"]
    assert graphs.buckets == (Bucket(1, 1), Bucket(2, 1), Bucket(4, 1), Bucket(4, 4))
    with pytest.raises(AssertionError, match="once, before the engine is ready"):
        graphs.capture()
    admit(tables, 0, (1, 2, 3), (5,))
    graphs.replay(Bucket(1, 1), [row(0, 2)])
    assert (recorder.captured, recorder.replayed) == (4, 1)


def test_a_replay_computes_its_rows_and_writes_their_tokens() -> None:
    graphs, tables, cache, _ = make([Bucket(4, 1)])
    admit(tables, 2, (1, 2, 3), (5,))
    admit(tables, 0, (7, 8, 9, 10, 4), (6, 9))
    recorded = graphs.replay(Bucket(4, 1), [row(2, 2), row(0, 4)])
    table = model().embed(torch.arange(VOCAB))
    want = (table[[3, 4]] @ table.T).argmax(dim=1)
    assert recorded.tokens[:2].tolist() == want.tolist()
    assert [int(tables.tokens[2, 3]), int(tables.tokens[0, 5])] == want.tolist()
    written = torch.nonzero(~cache.isnan()).squeeze(1).tolist()
    assert set(written) == {0, 5 * BLOCK + 2, 9 * BLOCK + 0}, "slot 0 of block 0 is the padding's"
    assert torch.equal(cache[[5 * BLOCK + 2, 9 * BLOCK]], table[[3, 4], 0])
    assert torch.equal(recorded.taps[0][:2], table[[3, 4]])


def test_rows_that_are_nobodys_touch_nothing_of_anybodys() -> None:
    graphs, tables, cache, _ = make([Bucket(4, 4)])
    for slot in range(3):
        admit(tables, slot, (1 + slot, 2, 3), (3 + slot,))
    before = tables.tokens.clone()
    graphs.replay(Bucket(4, 4), [row(1, 2, (5,))])
    assert torch.equal(tables.tokens[[0, 2, 3]], before[[0, 2, 3]])
    assert torch.equal(tables.tokens[1, :3], before[1, :3])
    mine = range(4 * BLOCK, 5 * BLOCK)
    written = set(torch.nonzero(~cache.isnan()).squeeze(1).tolist())
    assert written <= {*range(BLOCK), *mine}


def test_a_new_owner_of_a_slot_finds_nothing_of_the_last() -> None:
    _, tables, *_ = make([Bucket(1, 1)])
    admit(tables, 1, tuple(range(10)), (3, 4, 5))
    admit(tables, 1, (1, 2), (7,))
    assert tables.block_tables[1].tolist() == [7] + [0] * (tables.block_tables.shape[1] - 1)
    assert tables.tokens[1, :3].tolist() == [1, 2, UNWRITTEN]


def test_places_are_those_of_the_real_queries() -> None:
    graphs, tables, *_ = make([Bucket(2, 4)])
    admit(tables, 0, (1, 2), (3,))
    admit(tables, 1, (1, 2), (4,))
    rows = [row(0, 1, (5, 6)), row(1, 1)]
    assert graphs.replay(Bucket(2, 4), rows).places(rows) == [0, 1, 2, 4]


class NoDrafter:
    max_width, placement, taps = 3, "host", ()


def test_penalties_count_the_drafts_that_the_recording_wrote_over() -> None:
    """Its own tokens go where the drafts stood; what is chosen anew must still see the drafts."""

    def tokens(recorded: bool) -> list[list[int]]:
        decoder = replace(model(), on_triton=runs_triton("cpu"))
        tables, cache = DeviceTables(4, max_len=24, max_draft_width=3, block_size=BLOCK, device="cpu"), torch.zeros(128)
        runner = ModelRunner(decoder, cache, tables)  # type: ignore[arg-type]
        if recorded:
            runner.graphs = StepGraphs(decoder, cache, tables, (), [Bucket(1, 4)], Recorder())  # type: ignore[arg-type]
            runner.graphs.capture()
        params = SamplingParams(temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=1.5)
        prompt = StepPlan(0, (Admit(0, (1, 2, 3), 3, params, 0, ()),), (StepRow(0, 0, 3, (), True, 0, 0, (1,)),))
        tables.apply(prompt)
        runner.launch(prompt)
        found = []
        for drafts in ((5, 6, 7), (4, 4, 4), (0, 8, 9), (10, 10, 1)):
            plan = StepPlan(1, (), (StepRow(0, 3, 1, drafts, True, 1, 1, (2,)),))
            tables.apply(plan)
            sampled = runner.launch(plan).sampled
            assert sampled is not None
            found.append(sampled.choice.tokens.tolist())
        return found

    assert tokens(recorded=True) == tokens(recorded=False)
