"""Keys and values of several ranks that left the pool and came back: every rank has the bytes that it had, and tokens
are those of an engine that computed them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from msgspec import structs
from torch import Tensor

from engine.assembly.errors import AssemblyError
from engine.kernels.storage import as_bits
from engine.kv.records import Records
from engine.startup import worker
from engine.step.plan import RecordMove, StepPlan, StepResult
from engine.step.runner import ModelRunner
from engine.testing.kv_store import wait_until
from tests.selection import few

from .drafted import answers
from .kv_models import DRAFTERS, LENGTHS, OUTPUT, Reference, References, start
from .kv_models import references as references
from .test_kv_stores import FAILED, HOST, empty_pool, loaded_by, served, wait_until_nothing_is_held, with_further

THREADS = ("parallelism=threads", "communicator=simulated")
LAYOUTS = {
    "tp 2": ("parallelism.tp=2",),
    "tp 3": ("parallelism.tp=3",),
    "pp 2": ("parallelism.pp=2",),
    "tp 2 pp 2": ("parallelism.tp=2", "parallelism.pp=2"),
    "dcp 2 of 2": ("parallelism.tp=2", "parallelism.dcp=2"),
    "dcp 2 of 4": ("parallelism.tp=4", "parallelism.dcp=2"),
    "pcp 2": ("parallelism.pcp=2", "parallelism.pcp_min_tokens=4"),
}
CASES = [
    ("mistral", "tp 2"), ("qwen2", "pp 2"), ("deepseek_v2", "dcp 2 of 2"), ("qwen3_5_text", "tp 2"),
    ("llama4_text", "pp 2"), ("qwen2", "dcp 2 of 4"), ("gemma4_text", "tp 2"), ("qwen3_5_text", "pp 2"),
    ("qwen2", "pcp 2"), ("deepseek_v2", "tp 2 pp 2"), ("qwen2", "tp 3"), ("llama4_text", "tp 2"),
]  # fmt: skip
"""The first stage of qwen2 has no layer with a window; latent keys of deepseek_v2 are on every rank with tp 2."""


class Copies:
    """What every rank copies to slots and back."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._stored: dict[tuple[Records, int, int], list[Tensor]] = {}
        self.loads, self.ranks = count(), set[Records]()
        gather, scatter = Records.gather, Records.scatter

        def stored(own: Records, group: int, blocks: Sequence[int], slots: Sequence[int]) -> Any:
            for block, slot in zip(blocks, slots, strict=True):
                self._stored[own, group, slot] = bytes_of(own, group, block)
            return gather(own, group, blocks, slots)

        def loaded(own: Records, group: int, slots: Sequence[int], blocks: Sequence[int]) -> None:
            scatter(own, group, slots, blocks)
            self.ranks.add(own)
            for block, slot in zip(blocks, slots, strict=True):
                before, now = self._stored[own, group, slot], bytes_of(own, group, block)
                assert all(map(torch.equal, before, now)), "a rank's part of a block is not what it was"
                next(self.loads)

        patch.setattr(Records, "gather", stored)
        patch.setattr(Records, "scatter", loaded)


def bytes_of(records: Records, group: int, block: int) -> list[Tensor]:
    return [as_bits(part[block]).clone() for part in records._parts[group]]


def ranks_of(layout: str) -> int:
    return {"tp 3": 3, "tp 2 pp 2": 4, "dcp 2 of 4": 4}.get(layout, 2)


@few(5)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_every_rank_loads_the_bytes_that_it_computed(
    references: References, name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, copies = references(name), Copies(monkeypatch)
    core = start(reference, *HOST, *THREADS, *LAYOUTS[layout]).core
    first = answers(core, reference.requests("first"), 6)
    assert tuple(answer.tokens for answer in first) == reference.tokens
    settle(core)
    empty_pool(core)
    found, loaded = loaded_by(core, reference.turns("then"))
    assert tuple(answer.tokens for answer in found) == tuple(tokens[-10:] for tokens in reference.tokens)
    size = core._pool.block_size
    whole = [(length + OUTPUT - 11) // size * size for length in LENGTHS]
    assert [loaded[f"then{i}"] for i in range(len(LENGTHS))] == whole
    assert len(copies.ranks) == ranks_of(layout) and next(copies.loads) > 0
    settle(core)
    core._pool.tiers._memory.store.check()
    core.check_idle()
    core.close()


def settle(core: Any) -> None:
    """Wait until all ranks have stored what was computed."""
    memory = core._pool.tiers._memory
    while any(memory._writing):
        threading.Event().wait(0.001)
        core.take_stored()


@few(2)
@pytest.mark.parametrize(("name", "layout"), [("qwen2", "tp 2"), ("llama4_text", "pp 2"), ("qwen3_5_text", "tp 2")])
def test_preempted_requests_load_what_a_small_pool_lost(
    references: References, name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, copies = references(name), Copies(monkeypatch)
    short = Reference(reference.path, reference.prompts[:4] * 2, reference.tokens[:4] * 2)
    tight = ("memory.kv_tokens=112", "scheduler.token_budget=16")
    core = start(short, *HOST, *tight, *THREADS, *LAYOUTS[layout]).core
    cast("Any", core._pool.tiers).load_bound.most_bytes = lambda step_ms: 1
    first, _ = short.check(core, batch=8)
    assert sum(answer.timings.preemptions for answer in first)
    assert next(copies.loads) > 0
    core.check_idle()
    core.close()


def test_a_drafter_of_the_last_stage_finds_its_own_keys(references: References) -> None:
    reference = references("qwen2")
    chosen = [override.format(path=reference.path) for override in DRAFTERS["draft_model"]]
    core = start(reference, *HOST, *chosen, *THREADS, "parallelism.pp=2").core
    first = answers(core, reference.requests("first"), 6)
    settle(core)
    empty_pool(core)
    found, loaded = loaded_by(core, reference.requests("again"))
    assert [answer.tokens for answer in found] == [answer.tokens for answer in first]
    assert sum(loaded.values()) > 0
    accepted = [sum(answer.timings.accepted_tokens for answer in some) for some in (first, found)]
    assert accepted[1] >= 0.9 * accepted[0]
    core.close()


def test_what_one_rank_could_not_store_nobody_finds(references: References, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = references("qwen2")
    core = start(reference, *HOST, *THREADS, "parallelism.tp=2").core
    own, gather = core._device._steps._queue._runner.records, Records.gather

    def on_rank_0(records: Records, *copied: Any) -> Any:
        if records is not own:
            raise OSError("no memory")
        return gather(records, *copied)

    monkeypatch.setattr(Records, "gather", on_rank_0)
    answers(core, reference.requests("first"), 6)
    settle(core)
    empty_pool(core)
    found, loaded = loaded_by(core, reference.turns("then"))
    assert tuple(answer.tokens for answer in found) == tuple(tokens[-10:] for tokens in reference.tokens)
    assert not any(loaded.values())
    core._pool.tiers._memory.store.check()
    core.close()


@few(5)
@pytest.mark.parametrize("store", ["disk", "peer"])
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_another_engine_of_the_same_layout_reads_them_from_a_further_store(
    references: References, name: str, layout: str, store: str, tmp_path: Path
) -> None:
    reference, chosen = references(name), (*with_further(store, tmp_path), *THREADS, *LAYOUTS[layout])
    first = start(reference, *chosen).core
    answers(first, reference.requests("first"), 6)
    settle(first)
    records = first.stats().stores[0].records
    with ExitStack() as meanwhile:
        if store == "disk":
            first.close()
        again = start(reference, *chosen).core
        if store == "peer":
            meanwhile.enter_context(served(first, records, again))
        found, loaded = loaded_by(again, reference.turns("then"))
    assert tuple(answer.tokens for answer in found) == tuple(tokens[-10:] for tokens in reference.tokens)
    size = again._pool.block_size
    whole = [(length + OUTPUT - 11) // size * size for length in LENGTHS]
    assert [loaded[f"then{i}"] for i in range(len(LENGTHS))] == [upto * (upto >= 32) for upto in whole]
    further = again.stats().stores[1]
    assert further.loaded_tokens >= max(whole) and not any(further.skipped[why] for why in FAILED)
    for core in (again, first) if store == "peer" else (again,):
        settle(core)
        wait_until_nothing_is_held(core)
        core.check_idle()
        core.close()
        core._pool.tiers._memory.store.check()


def test_engines_of_another_layout_find_nothing_in_the_same_folder(references: References, tmp_path: Path) -> None:
    reference, stores = references("deepseek_v2"), with_further("disk", tmp_path)
    found = []
    for layout in ("tp 2", "pp 2", "dcp 2 of 2", "one rank", "tp 2"):
        core = start(reference, *stores, *(() if layout == "one rank" else (*THREADS, *LAYOUTS[layout]))).core
        outputs, loaded = loaded_by(core, reference.requests(layout))
        assert tuple(answer.tokens for answer in outputs) == reference.tokens
        found.append(sum(loaded.values()))
        settle(core)
        core.close()
    assert found[:4] == [0] * 4 and found[4] > 0


def test_records_are_not_let_go_before_every_rank_has_them_in_its_blocks(
    references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where a rank waits for no other one to compute."""
    reference = references("qwen2")
    core: Any = start(reference, *HOST, *THREADS, "parallelism.tp=2").core
    own, scatter, may_go = core._device._steps._queue._runner.records, Records.scatter, threading.Event()

    class Computed:
        def __init__(self, plan: StepPlan) -> None:
            self.result = lambda: StepResult(plan.plan_id, (), 0.0)

    monkeypatch.setattr(ModelRunner, "launch", lambda runner, plan: Computed(plan))

    def late(records: Records, *copied: Any) -> None:
        assert records is own or may_go.wait(20.0)
        scatter(records, *copied)

    monkeypatch.setattr(Records, "scatter", late)
    plan = StepPlan(1 << 20, (), (), loads=(RecordMove(0, (1,), (0,)),))
    result, done = core._device.launch(plan), list[StepResult]()
    waiting = threading.Thread(target=lambda: done.append(result()))
    waiting.start()
    wait_until(lambda: plan.plan_id in core._device._workers._results, "rank 0 is not done")
    waiting.join(0.2)
    assert not done
    may_go.set()
    waiting.join(20.0)
    assert [each.plan_id for each in done] == [plan.plan_id]
    core.close()


def test_what_is_behind_memory_needs_all_ranks_on_one_machine(
    references: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory alone does not: each rank keeps its part, as long as the engine lives."""
    reference, opened = references("qwen2"), worker.opened
    monkeypatch.setattr(worker, "opened", lambda opening: opened(structs.replace(opening, identity=("other", 0, 0))))
    with pytest.raises(
        AssemblyError, match=r"=\[host,disk\]: .*\(rank 1: .*another file.*use kv_store=\[host\], or ranks"
    ):
        start(reference, *with_further("disk", tmp_path), *THREADS, "parallelism.tp=2")
    core = start(reference, *HOST, *THREADS, "parallelism.tp=2").core
    answers(core, reference.requests("first"), 6)
    settle(core)
    empty_pool(core)
    found, loaded = loaded_by(core, reference.turns("then"))
    assert tuple(answer.tokens for answer in found) == tuple(tokens[-10:] for tokens in reference.tokens)
    assert sum(loaded.values()) > 0
    core.close()


def test_a_bound_on_bytes_counts_all_ranks(references: References) -> None:
    """The second stage has what the first has not, so that a rank's own bytes would say something else."""
    reference, most = references("qwen2"), 1 << 20
    host = (*HOST, f"kv_store.host.max_bytes={most}")
    sizes = []
    for layout in ((), ("parallelism.pp=2",), ("parallelism.tp=2",)):
        core = start(reference, *host, *(THREADS if layout else ()), *layout).core
        sizes.append(core._pool.tiers._memory.store.num_slots)
        core.close()
    assert sizes == [sizes[0]] * 3
