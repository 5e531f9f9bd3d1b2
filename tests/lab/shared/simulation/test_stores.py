"""KV stores of simulated engines."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from tests.lab.shared.simulation.test_run import COST, spec
from tests.laws.harness import BLOCK

from engine.assembly.bind import build_context
from engine.assembly.errors import AssemblyError
from engine.contracts.kv_store import RecordLayout
from engine.contracts.step_cost import StepCost
from engine.loop import staging
from engine.testing.kv_store import num_had
from engine_lab.shared.simulation.clock import VirtualClock
from engine_lab.shared.simulation.outcome import Outcome
from engine_lab.shared.simulation.run import simulate
from engine_lab.shared.simulation.spec import EngineSpec
from engine_lab.shared.simulation.stores import HEADER, PAGE, SimulatedStore, record_bytes
from engine_lab.shared.simulation.trace import TraceRequest

POOL = 64
HOST, DISK = 3 * POOL, 10 * POOL
"""Blocks."""
SLOW = StepCost(10.0, 2.0, 100)
"""It pays to read from a disk."""


def of_records() -> int:
    """Bytes of one."""
    from engine.assembly.bind import describe_model
    from engine.kv.groups import cache_groups

    plan = spec().plan
    (size,) = record_bytes(plan, build_context(plan), cache_groups(describe_model(plan).graph.caches))
    return size


def with_stores(count: int, folder: Path, **fields: object) -> EngineSpec:
    """That many, behind a pool of :data:`POOL` blocks."""
    size = of_records()
    in_file = -(-(size + HEADER) // PAGE) * PAGE
    words = ["kv_store=[host,disk]", f"kv_store.host.max_bytes={HOST * size}", f"kv_store.disk.path={folder / 'kv'}"]
    words.append(f"kv_store.disk.max_bytes={DISK * in_file}")
    chosen = ([], ["kv_store=[host]", words[1]], words)[count]
    return spec(*chosen, blocks=1 + POOL, **{"cost": SLOW, **fields})  # type: ignore[arg-type]


def texts(count: int, kinds: int, blocks: int = 20) -> list[TraceRequest]:
    """Prompts of kinds of which few are frequent, one after another, each with a tail of its own."""
    rng = random.Random(4)
    weights = [1 / (kind + 1) for kind in range(kinds)]
    chosen = rng.choices(range(kinds), weights, k=count)
    return [
        TraceRequest(
            5.0 * i,
            blocks * BLOCK,
            2,
            (*range(kind * 100, kind * 100 + rng.randint(4, blocks - 1)), 100_000 + i),
            BLOCK,
        )
        for i, kind in enumerate(chosen)
    ]


def shares(outcome: Outcome) -> list[float]:
    """Of prompt tokens: from the pool, from ``host`` and from ``disk``."""
    loaded = [sum(each.loaded.get(name, 0) for each in outcome.requests) for name in ("host", "disk")]
    pool = sum(each.cached_tokens for each in outcome.requests) - sum(loaded)
    return [tokens / sum(each.prompt_tokens for each in outcome.requests) for tokens in (pool, *loaded)]


def lru(trace: Sequence[TraceRequest], most: int) -> float:
    """The share of prompt tokens that are found in a cache of so many blocks, the end of a text first to go."""
    cached, found = OrderedDict[object, None](), 0
    for which, each in enumerate(trace):
        count = each.prompt_tokens // BLOCK
        own = [(which, at) for at in range(count - len(each.block_hashes))]
        keys = [*each.block_hashes, *own]
        found += next((at for at, key in enumerate(keys) if key not in cached), count) * BLOCK
        for key in reversed(keys):
            cached[key] = None
            cached.move_to_end(key)
        while len(cached) > most:
            cached.popitem(last=False)
    return found / sum(each.prompt_tokens for each in trace)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_every_tier_finds_what_a_plain_lru_of_its_size_would(count: int, tmp_path: Path) -> None:
    trace = texts(400, kinds=40)
    outcome = simulate(trace, [with_stores(count, tmp_path)])
    together = [lru(trace, blocks) for blocks in (POOL, HOST, DISK)[: count + 1]]
    expected = [together[0], *(more - less for less, more in pairwise(together))]
    assert all(share > 0.04 for share in expected)
    found = shares(outcome)
    assert found[: count + 1] == pytest.approx(expected, abs=0.02) and not any(found[count + 1 :])
    assert [state.name for state in outcome.stores[0]] == ["host", "disk"][:count]
    assert all(state.evicted and state.num_bytes <= state.most_bytes for state in outcome.stores[0])
    assert not (tmp_path / "kv").exists(), "a store that is simulated writes nothing"


def test_a_request_waits_for_its_records_and_is_computed_when_they_are_late(tmp_path: Path) -> None:
    """The first text is on the disk alone when it comes again."""
    other = [
        TraceRequest(60.0 + i, 19 * BLOCK, 2, tuple(range(1000 + 50 * i, 1019 + 50 * i)), BLOCK) for i in range(12)
    ]
    text = tuple(range(20))
    trace = [
        TraceRequest(0.0, 20 * BLOCK + 1, 2, text, BLOCK),
        *other,
        TraceRequest(100.0, 20 * BLOCK + 1, 2, text, BLOCK),
    ]
    computed_ms = SLOW.base_ms + SLOW.per_token_ms * (20 * BLOCK + 1)
    num_bytes = 20 * of_records()

    def last(rate: float) -> tuple[dict[str, int], float]:
        found = simulate(trace, [with_stores(2, tmp_path, rates={"disk": rate, "host": 1e12})]).requests[-1]
        return dict(found.loaded), found.ttft_ms

    loaded, ttft_ms = last(num_bytes / 0.1)
    assert loaded == {"disk": 20 * BLOCK}
    assert ttft_ms == pytest.approx(100.0 + SLOW.base_ms + SLOW.per_token_ms, abs=1.0)
    loaded, ttft_ms = last(num_bytes / 10.0)
    assert loaded == {} and computed_ms < ttft_ms < 1.6 * computed_ms + 100.0


@pytest.mark.parametrize("longer", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("believed", [0.1, 1.0, 10.0])
def test_many_prompts_at_once_are_not_later_because_a_disk_has_them(
    longer: float, believed: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``longer``: reading takes than computing; ``believed``: of the rate, at first."""
    count, tokens = 28, 20 * BLOCK
    computed_ms = SLOW.base_ms + SLOW.per_token_ms * tokens
    rate = 20 * of_records() / (longer * computed_ms / 1e3)
    monkeypatch.setattr(staging, "FIRST_RATE", believed * rate)
    asked = [(10.0 * i, i) for i in range(count)] + [(1e4, i) for i in range(count)]
    trace = [TraceRequest(at_s, tokens + 1, 1, tuple(range(100 * i, 100 * i + 20)), BLOCK) for at_s, i in asked]

    def latest(stores: int) -> float:
        done = simulate(trace, [with_stores(stores, tmp_path, rates={"disk": rate, "host": 1e12})]).requests[count:]
        assert (stores == 2) or not any(each.loaded.get("disk") for each in done)
        return sorted(each.ttft_ms for each in done)[-2]

    deadline_ms = (1.0 + staging.LATEST) * computed_ms
    assert latest(2) <= 1.05 * latest(1) + (0.0 if believed == 1.0 else deadline_ms)


def test_copies_between_pool_and_memory_take_time(tmp_path: Path) -> None:
    text = tuple(range(20))
    trace = [
        TraceRequest(0.0, 20 * BLOCK, 1, text, BLOCK),
        TraceRequest(9.0, 20 * BLOCK, 1, (*range(500, 560),), BLOCK),
    ]
    trace += [TraceRequest(20.0 + i, 20 * BLOCK, 1, (*range(700 + 50 * i, 720 + 50 * i),), BLOCK) for i in range(4)]
    trace.append(TraceRequest(90.0, 20 * BLOCK + 1, 1, text, BLOCK))
    rate = 20 * of_records() / 0.25
    for engine, extra_ms in ((with_stores(1, tmp_path, rates={"host": rate}), 250.0), (with_stores(1, tmp_path), 0.0)):
        last = simulate(trace, [engine]).requests[-1]
        assert last.loaded == {"host": 20 * BLOCK}
        assert last.ttft_ms == pytest.approx(SLOW.base_ms + SLOW.per_token_ms + extra_ms, abs=3.0)


def test_a_simulated_store_keeps_its_bound_and_forgets_what_it_should() -> None:
    clock, done = VirtualClock(), []
    store = SimulatedStore("disk", 3 * PAGE, rate=1000.0, clock=clock)
    store.open(RecordLayout(bytes(32), (500,)), lambda: None)
    ids = [(0, bytes([number]) * 32) for number in range(5)]
    for number, each in enumerate(ids[:4]):
        assert store.put(*each, memoryview(bytes(500)), lambda number=number: done.append(number))  # type: ignore[misc]
    assert num_had(store, ids) == 0 and done == []
    clock.now = 1.0
    assert num_had(store, ids) == 2 and done == [0, 1]
    job = store.get(ids[:1], [])
    clock.now = 2.0
    assert store.poll() == [(job, 1)] and done == [0, 1, 2, 3]
    assert [store.has(*each) for each in ids] == [True, False, True, True, False], "the one not read made way"
    assert store.usage().num_bytes == 3 * PAGE and store.usage().evicted == 1
    assert not store.put(*ids[0], memoryview(bytes(500)), lambda: None)
    assert store.put(*ids[4], memoryview(bytes(500)), lambda: done.append(4))
    store.clear()
    clock.now = 9.0
    assert num_had(store, ids) == 0 and done[-1] == 4


def test_a_first_store_without_memory_and_memory_without_room_are_refused(tmp_path: Path) -> None:
    disk = spec("kv_store=[disk]", f"kv_store.disk.path={tmp_path}")
    with pytest.raises(AssemblyError, match=r"kv_store=\[disk\]: disk has no memory that the device copies from"):
        simulate([], [disk])
    with pytest.raises(AssemblyError, match="host cannot reserve its memory here"):
        simulate([], [spec("kv_store=[host]", f"kv_store.host.max_bytes={sys.maxsize // 2}")])


def test_engines_without_stores_load_nothing() -> None:
    outcome = simulate([TraceRequest(0.0, 40, 3)], [spec(cost=COST)])
    assert outcome.stores == ((),) and outcome.requests[0].loaded == {}
