"""Forward metadata of a captured drafter: each call has its own, which lives as long as the graph."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from engine.assembly.errors import AssemblyError
from engine.contracts.drafter import DraftRows, DraftTokens
from engine.drafting.graphs import DraftBucket, DraftGraphs, draft_rows
from engine.drafting.metadata import CapturedMetadata
from engine.startup.rank import drafts_of
from engine.step.graphs import Bucket

from ..laws.drafted import Models
from .capturing import Capturing
from .test_draft_graphs import Old, Toy, toy_engine


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


class Placing(Toy):
    """Asks for places before it proposes."""

    def __init__(self, ask: Callable[[DraftRows], Any]) -> None:
        self.ask = ask

    def propose(self, rows: DraftRows) -> DraftTokens:
        if rows.index and rows.capture is not None:
            self.ask(rows)
        return super().propose(rows)


def captured_metadata(engine: Capturing) -> tuple[CapturedMetadata, DraftRows]:
    """As a captured step of two rows has them, in a pass that begins."""
    steps = engine.runner.graphs
    assert steps is not None
    step = steps.captured(Bucket(2, 1))
    blocks = steps.tables.block_tables

    def lend(call: int, group: int, count: int) -> Tensor:
        return blocks.new_zeros(count, blocks.shape[2])

    places = CapturedMetadata(steps.tables, step.batch.attention, steps.attention, lend)
    places.begin()
    return places, draft_rows(step, steps.tables, DraftBucket(step.bucket, 2), places)


def test_calls_of_a_pass_share_nothing_and_those_of_the_next_have_the_same(models: Models) -> None:
    places, rows = captured_metadata(toy_engine(models, Old()))
    later = replace(rows, positions=rows.positions + 5)
    passes = []
    for _ in range(2):
        places.begin()
        batches = [one.attention[0] for which in (rows, later) for one in places.chain_metadata(which, 2)]
        batches += [places.block_metadata(which, 2).attention[0] for which in (rows, later)]
        passes.append([batch.kv_lens_device.data_ptr() for batch in batches])
        ends = [rows.positions + 1, rows.positions + 2, later.positions + 1, later.positions + 2]
        ends += [(which.positions + 2).repeat_interleave(2) for which in (rows, later)]
        for batch, end in zip(batches, ends, strict=True):
            assert batch.kv_lens_device.tolist() == end.tolist(), "of this call, although others came after it"
    assert passes[0] == passes[1] and len(set(passes[0])) == 6


def test_blocks_of_a_pass_have_block_tables_of_their_own(models: Models) -> None:
    drafts = drafts_of(toy_engine(models, Toy()).runner).graphs
    assert drafts is not None
    first, second = drafts._lend(0, 0, 4), drafts._lend(1, 0, 4)
    assert first.data_ptr() != second.data_ptr() and drafts._lend(0, 0, 2).data_ptr() == first.data_ptr()


@pytest.mark.parametrize("index", [(0,), (1, 0)])
def test_metadata_of_other_rows_than_the_steps_are_refused(models: Models, index: tuple[int, ...]) -> None:
    def ask(rows: DraftRows) -> None:
        if len(rows.index) == 2:
            rows.capture.chain_metadata(replace(rows, index=index), 1)

    with pytest.raises(AssemblyError, match=rf"forward metadata of rows \[{index[0]}.*: expected .* all 2 of the step"):
        toy_engine(models, Placing(ask))


def test_what_a_graph_reads_lives_as_long_as_the_graphs(models: Models) -> None:
    """A CUDA graph knows addresses only."""
    lengths: list[weakref.ref[Tensor]] = []

    def ask(rows: DraftRows) -> None:
        lengths.append(weakref.ref(rows.capture.chain_metadata(rows, 1)[0].attention[0].kv_lens_device))

    def forgetting(step: Callable[[], None]) -> Callable[[], None]:
        step()
        return lambda: None

    engine = toy_engine(models, Old())
    assert engine.runner.graphs is not None
    drafts = DraftGraphs(Placing(ask), engine.runner.graphs, forgetting)
    drafts.capture()
    gc.collect()
    assert len(lengths) > 5 and all(length() is not None for length in lengths)
    del drafts
    gc.collect()
    assert all(length() is None for length in lengths)
