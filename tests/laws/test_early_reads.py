"""What kernels read before their wait was there when they were launched. Runs in Triton's interpreter (see
``tests/interpreted.py``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.tile_ops import start_dependents, wait_for_input
from engine.step.graphs import Bucket, StepGraphs
from engine.step.tables import DeviceTables

from ..early_reads import EarlyReads, watch_early_reads
from ..kernels import tiny
from .test_captured_models import BLOCK, triton_model


@triton.jit
def add_one(out_ptr):
    tl.store(out_ptr, tl.load(out_ptr) + 1)


@triton.jit
def add_one_early(out_ptr, PDL: tl.constexpr):
    start_dependents(PDL)
    wait_for_input(PDL)
    tl.store(out_ptr, tl.load(out_ptr) + 1)


@triton.jit
def read_early(where_ptr, out_ptr, PDL: tl.constexpr):
    start_dependents(PDL)
    where = tl.load(where_ptr)
    wait_for_input(PDL)
    tl.store(out_ptr, tl.load(out_ptr) + where)


def written(by: Callable[[Tensor], object], then: Callable[[Tensor], object]) -> EarlyReads:
    """What is found where something is written, something else done, and it is read early."""
    where, other = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with watch_early_reads() as reads:
        by(where)
        then(other)
        read_early[(1,)](where, other, PDL=False)
    assert reads.read == {"read_early: where_ptr"}
    return reads


LAUNCHES: dict[str, Callable[[Tensor], object]] = {
    "normal": lambda at: add_one[(1,)](at),
    "of torch": lambda at: at.add_(1),
    "early": lambda at: add_one_early[(1,)](at, PDL=False),
    "none": lambda at: None,
}


@pytest.mark.parametrize("kind", ["normal", "of torch"])
def test_what_is_written_normally_may_be_read_early_behind_another_normal_launch(kind: str) -> None:
    assert written(LAUNCHES[kind], LAUNCHES[kind]).found == []


@pytest.mark.parametrize(("by", "then"), [("early", "normal"), ("normal", "early"), ("normal", "none")])
def test_what_an_early_launch_writes_and_what_has_just_been_written_is_found(by: str, then: str) -> None:
    reads = written(LAUNCHES[by], LAUNCHES[then])
    assert reads.found == [f"read_early: where_ptr, written by {'add_one_early' if by == 'early' else 'add_one'}"]


def test_a_captured_step_reads_early_what_is_there(tmp_path: Path) -> None:
    plan, _, model, kv = triton_model(tiny.write(tmp_path, layers=2))
    tables, found = DeviceTables(3, plan.max_len, 2, BLOCK, "cpu", plan.model.vocab_size), list[EarlyReads]()
    tables.computed[:] = 11

    def watched(step: Callable[[], None]) -> Callable[[], None]:
        step()  # the first, largest step makes memory
        tables.computed.add_(1 + len(found))  # lengths that were not there before
        with watch_early_reads() as reads:
            step()
        found.append(reads)
        return step

    StepGraphs(model, kv, tables, (), [Bucket(3, 1), Bucket(1, 3), Bucket(1, 24, prompt=True)], watched).capture()
    assert [reads.found for reads in found] == [[]] * len(found)
    attention = {f"{kernel}: kv_lens_ptr" for kernel in ("split_attention", "chunk_attention")}
    assert attention <= set().union(*(reads.read for reads in found))
