"""Keys and values that left the pool and came back from a store: tokens are those of an engine that computed them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from engine.assembly.errors import AssemblyError
from engine.contracts.kv_store import RecordLayout, StagedStore, StoreUsage
from engine.contracts.request import EngineRequest, SamplingParams
from engine.contracts.step_cost import StepCost, StepWork
from engine.loop import pool
from engine.loop.core import EngineCore
from engine.loop.driver import drive
from engine.loop.inbox import Inbox
from engine.loop.messages import Failed, FromEngine, Submit
from engine.plugin_guard.calls import named
from engine.startup.segments import Segments
from engine.testing.kv_store import files_in_memory
from engine_plugins.kv_store.host import HostStore
from tests.addresses import free_addresses
from tests.selection import few

from .drafted import Answer, answers
from .kv_models import DRAFTERS, FAMILIES, GREEDY, LENGTHS, OUTPUT, Reference, References, start
from .kv_models import references as references

HOST = ("kv_allocator=prefix_cache", "kv_store=[host]", "kv_store.host.max_bytes=67108864", "scheduler.max_requests=8")


FAILED = ("late", "incomplete")
SLOW = StepCost(10_000.0, 0.0, 1, largest=StepWork.chunk(4096))
"""Of steps: any read is worth while."""


def empty_pool(core: EngineCore) -> None:
    """Forget what is in blocks; records stay."""
    core._pool.allocator.reset_cache()


def loaded_by(core: EngineCore, requests: list[EngineRequest]) -> tuple[list[Answer], dict[str, int]]:
    """Answers, and how many tokens of each request came from records. Until a step was measured any read is worth
    while."""
    cast("Any", core._pool.tiers)._first_cost = SLOW
    found = answers(core, requests, 6)
    names = [request.request_id for request in requests]
    return found, {name: answer.timings.loaded_tokens for name, answer in zip(names, found, strict=True)}


@few(8)
@pytest.mark.parametrize("kv_format", ["native", "int8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_next_turns_load_what_the_pool_has_lost(references: References, name: str, kv_format: str) -> None:
    reference = references(name)
    lossy = f"kv_format={kv_format}"
    computed, core = start(reference, *HOST[:1], lossy).core, start(reference, *HOST, lossy).core
    expected = [answers(computed, make("a"), 6) for make in (reference.requests, reference.turns)]
    answers(core, reference.requests("first"), 6)
    empty_pool(core)
    found, loaded = loaded_by(core, reference.turns("then"))
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected[1]]
    if kv_format == "native":
        assert tuple(answer.tokens for answer in found) == tuple(tokens[-10:] for tokens in reference.tokens)
    whole = [(length + OUTPUT - 11) // 8 * 8 for length in LENGTHS]
    assert [loaded[f"then{i}"] for i in range(len(LENGTHS))] == whole
    core._pool.tiers.poll()
    core._pool.tiers._memory.store.check()
    core.check_idle()
    core.close()
    computed.close()


@contextmanager
def served(core: EngineCore, records: int, other: EngineCore) -> Iterator[None]:
    """Meanwhile an engine that has nothing to do gives others its records, as its loop would; so many are known to the
    other one."""
    ends = threading.Event()

    def poll() -> None:
        while not ends.wait(0.002):
            core.take_stored()

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        while other.stats().stores[1].records < records:
            time.sleep(0.002)
        yield
    finally:
        ends.set()
        thread.join()


def wait_until_nothing_is_held(core: EngineCore) -> None:
    ends = time.monotonic() + 20.0
    while any(group.holds for group in core._pool.tiers._memory.store._groups):
        assert time.monotonic() < ends, "records are still held"
        core.take_stored()
        time.sleep(0.002)


def with_further(store: str, folder: Path) -> tuple[str, ...]:
    """An engine with a further store: what it has in ``folder``, or what another one of this call has in memory."""
    (folder / "token").write_text("t" * 32)
    own = {
        "disk": (f"kv_store.disk.path={folder / 'kv'}", "kv_store.disk.max_bytes=67108864"),
        "peer": (
            f"kv_store.peer.peers=[{','.join(free_addresses(2))}]",
            f"kv_store.peer.token_file={folder / 'token'}",
            "kv_store.peer.timeout_s=20",
        ),
    }
    return (*HOST, f"kv_store=[host,{store}]", *own[store])


@few(5)
@pytest.mark.parametrize("store", ["disk", "peer"])
@pytest.mark.parametrize("name", FAMILIES)
def test_another_engine_reads_them_from_a_further_store(
    references: References, name: str, store: str, tmp_path: Path
) -> None:
    reference, stores = references(name), with_further(store, tmp_path)
    engine = start(reference, *stores)
    first = engine.core
    answers(first, reference.requests("first"), 6)
    first.take_stored()
    records = first.stats().stores[0].records
    with ExitStack() as meanwhile:
        if store == "disk":
            first.close()
        other = start(reference, *stores)
        assert other.info.namespace == engine.info.namespace != ""
        again = other.core
        if store == "peer":
            meanwhile.enter_context(served(first, records, again))
        found, loaded = loaded_by(again, reference.turns("then"))
    assert tuple(answer.tokens for answer in found) == tuple(tokens[-10:] for tokens in reference.tokens)
    whole = [(length + OUTPUT - 11) // 8 * 8 for length in LENGTHS]
    assert [loaded[f"then{i}"] for i in range(len(LENGTHS))] == [upto * (upto >= 32) for upto in whole]
    host, further = again.stats().stores
    for answer in found:
        staged = answer.timings.staged
        assert answer.timings.loaded.get(store, 0) == (0 if staged is None else staged.num_tokens)
    assert host.loaded_tokens + further.loaded_tokens == sum(loaded.values()) and further.loaded_tokens >= max(whole)
    assert further.loads and further.loaded_bytes and further.load_s > 0.0
    assert not any(further.skipped[why] for why in FAILED)
    for core in (again, first) if store == "peer" else (again,):
        wait_until_nothing_is_held(core)
        core.close()
        core._pool.tiers._memory.store.check()


@few(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_engines_of_a_server_load_what_the_others_computed_and_the_next_one_what_is_left(
    references: References, name: str
) -> None:
    reference = references(name)
    whole = [(length + OUTPUT - 11) // 8 * 8 for length in LENGTHS]
    with files_in_memory(2) as files:
        first, second = [start(reference, *HOST, segments=Segments(files, own)) for own in range(2)]
        answers(first.core, reference.requests("first"), 6)
        first.core.close()  # all of it has its header
        found, loaded = loaded_by(second.core, reference.turns("then"))
        assert tuple(answer.tokens for answer in found) == tuple(tokens[-10:] for tokens in reference.tokens)
        assert [loaded[f"then{i}"] for i in range(len(LENGTHS))] == [upto * (upto >= 32) for upto in whole]
        second.core.close()
        (one,), (other,) = first.bound.kv_stores, second.bound.kv_stores
        assert isinstance(one, HostStore) and isinstance(other, HostStore)
        for own, its in zip(one._groups, other._groups, strict=True):
            assert not own.slot_of.keys() & its.slot_of.keys(), "a record is in memory twice"
        other.check()
        again = start(reference, *HOST, segments=Segments(files, 0)).core
        found, loaded = loaded_by(again, reference.turns("again"))
        assert tuple(answer.tokens for answer in found) == tuple(tokens[-10:] for tokens in reference.tokens)
        assert [loaded[f"again{i}"] for i in range(len(LENGTHS))] == whole
        again.close()


def test_what_was_computed_from_records_that_their_engine_has_cleared_is_forgotten(references: References) -> None:
    """In the pool and in records: the other engine found that they may be wrong."""
    reference = references("qwen2")
    with files_in_memory(2) as files:
        writer, reader = [start(reference, *HOST, segments=Segments(files, own)) for own in range(2)]
        answers(writer.core, reference.requests("first"), 6)
        writer.core.close()
        _, loaded = loaded_by(reader.core, reference.turns("then"))
        assert sum(loaded.values()) > 0
        writer.bound.kv_stores[0].clear()
        reader.core.take_stored()
        assert reader.core.stats().stores[0].records == 0
        assert all(blocks.cached == 0 for blocks in reader.core.stats().blocks)
        found = answers(reader.core, reference.turns("again"), 6)
        assert tuple(answer.tokens for answer in found) == tuple(tokens[-10:] for tokens in reference.tokens)
        reader.core.close()


@few(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_preempted_requests_and_next_turns_load_what_a_small_pool_lost(references: References, name: str) -> None:
    reference = references(name)
    short = Reference(reference.path, reference.prompts[:4] * 2, reference.tokens[:4] * 2)
    tight = ("memory.kv_tokens=112", "scheduler.token_budget=16", "kv_allocator=prefix_cache")
    preemptions, computed = [], []
    for stores in ((), HOST[1:3]):
        core, tokens = start(short, *tight, *stores).core, 0
        step = core._step_event

        def counted(*args: Any, step: Any = step) -> Any:
            nonlocal tokens
            event = step(*args)
            tokens += event.num_prefill_tokens
            return event

        core._step_event = counted
        first, _ = short.check(core, batch=8)
        preemptions.append(sum(answer.timings.preemptions for answer in first))
        computed.append(tokens)
        core.check_idle()
        core.close()
    assert name == "mistral" or all(preemptions), "a window in every layer: its texts fit"
    assert computed[1] < computed[0] / 2


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafters_find_their_own_keys_in_records(references: References, drafter: str) -> None:
    reference = references("qwen2")
    chosen = [override.format(path=reference.path) for override in DRAFTERS[drafter]]
    core = start(reference, *HOST, *chosen).core
    first = answers(core, reference.requests("first"), 6)
    empty_pool(core)
    found, loaded = loaded_by(core, reference.requests("again"))
    assert [answer.tokens for answer in found] == [answer.tokens for answer in first]
    assert sum(loaded.values()) > 0
    accepted = [[answer.timings.accepted_tokens for answer in some] for some in (first, found)]
    assert sum(accepted[1]) >= 0.9 * sum(accepted[0])
    core.close()


def test_what_a_request_computes_after_a_reset_is_not_stored(references: References) -> None:
    """It goes on from what was forgotten, perhaps because it was wrong."""
    reference = references("qwen2")
    engine = start(reference, *HOST)
    core, memory = engine.core, cast("Any", engine.bound.kv_stores[0])
    core.submit(reference.turns("first")[-1])
    while not any(output.tokens for output in core.step().outputs):
        pass
    core.take_stored()
    assert memory.usage().records
    core.reset_prefix_cache()
    while core.has_work:
        core.step()
    core.take_stored()
    assert memory.usage().records == 0
    answers(core, reference.turns("then"), 6)
    core.take_stored()
    assert memory.usage().records
    core.close()


BETWEEN: dict[str, Callable[[EngineCore, Sequence[Any]], None]] = {
    "nothing": lambda core, filling: None,
    "abort": lambda core, filling: core.abort([s.request_id for s in filling]),
    "preemption": lambda core, filling: core._planner.preempt(filling[0]),
    "reset": lambda core, filling: core.reset_prefix_cache(),
    "failed step": lambda core, filling: fail_once(core),
}
"""What happens to requests of which some records were copied."""


def fail_once(core: Any) -> None:
    runner = core._device._runner
    launch = runner.launch

    def fails(plan: Any) -> Any:
        runner.launch = launch
        raise RuntimeError("a step fails")

    runner.launch = fails


@few(7)
@pytest.mark.parametrize("name", ["qwen2", "qwen3_5_text", "llama4_text"])
@pytest.mark.parametrize("between", BETWEEN)
def test_loads_are_bounded_while_others_decode(references: References, name: str, between: str) -> None:
    reference = references(name)
    engine = start(reference, *HOST)
    core, device, memory = engine.core, cast("Any", engine.core._device), cast("Any", engine.bound.kv_stores[0])
    answers(core, reference.requests("first"), 6)
    sizes, plans, launch = device._runner.records.num_bytes, [], device.launch
    device.launch = lambda plan: (plans.append(plan), launch(plan))[1]
    most = 2 * sum(sizes)
    cast("Any", core._pool.tiers).load_bound.most_bytes = lambda step_ms: most
    core.take_stored()
    empty_pool(core)
    told: dict[str, list[int]] = {"short": []}
    core.submit(EngineRequest("short", reference.prompts[0], GREEDY))

    def step() -> None:
        for output in core.step().outputs:
            told.setdefault(output.request_id, []).extend(output.tokens)

    while not told["short"]:
        step()
    long, happened, first = reference.turns("long")[-2:], False, len(plans)
    for request in long:
        core.submit(request)
    while core.has_work:
        step()
        filling = [s for s in core._queues.running if s.fill is not None]
        if filling and not happened:
            BETWEEN[between](core, filling)
            happened = True
    count = len(told["short"]) if between == "failed step" else OUTPUT  # it ran alone in that step
    assert happened and told["short"] == list(reference.tokens[0][:count])
    for request, tokens in zip(long, reference.tokens[-2:], strict=True):
        assert told.get(request.request_id, []) == (list(tokens[-10:]) if between != "abort" else [])
    loaded = [sum([len(move.slots) * sizes[move.group] for move in plan.loads]) for plan in plans]
    decoding = [size for size, plan in zip(loaded, plans, strict=True) if len(plan.rows) == 1]
    assert max(decoding) <= most + max(sizes)
    if between == "nothing":
        given = dict[tuple[int, int], int]()
        for at, plan in enumerate(plans[first:]):
            for new in [new for row in plan.rows for new in row.new_blocks]:
                given.update({(new.group, block): at for block in new.blocks})
        copied = [
            (move.group, block, at)
            for at, plan in enumerate(plans[first:])
            for move in plan.loads
            for block in move.blocks
        ]
        assert len({at for *_, at in copied}) > 3
        assert all(at <= given[group, block] for group, block, at in copied), "computed before its records were there"
    core.check_idle()
    core.take_stored()
    memory.check()
    assert not any(own.holds for own in memory._groups)
    core.close()


class Careless:
    """Keeps all records, and ends reads in some way of its own."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.records: dict[tuple[int, bytes], bytes] = {}
        self.begun: list[tuple[float, int]] = []
        """Of each read that was not ended: when, and how many records are in its buffers."""
        self.reads = 0
        self.raises = ""

    def open(self, layout: RecordLayout, wake: Callable[[], None]) -> None: ...

    def usage(self) -> StoreUsage:
        return StoreUsage(len(self.records), 0, 1)

    def clear(self) -> None:
        self.records.clear()

    def close(self, deadline_s: float) -> None:
        self._fail("close")

    def has(self, group: int, key: bytes) -> bool:
        self._fail("has")
        return (group, key) in self.records

    def put(self, group: int, key: bytes, record: memoryview, done: Callable[[], None]) -> bool:
        self._fail("put")
        self.records[group, key] = bytes(record)
        done()
        return True

    def get(self, ids: Sequence[tuple[int, bytes]], into: Sequence[memoryview]) -> int:
        self._fail("get")
        good = {"fewer": len(ids) // 2, "gone": 0}.get(self.how, len(ids))
        for buffer in into:
            buffer[:] = b"\xff" * len(buffer)  # not a number, where nothing else is read
        for each, buffer in zip(ids[:good], into, strict=False):
            buffer[:] = self.records[each]
        self.begun.append((time.monotonic(), good))
        self.reads += 1
        return self.reads - 1

    def poll(self) -> Sequence[tuple[int, int]]:
        self._fail("poll")
        least = {"never": 1e9, "late": 0.3}.get(self.how, 0.0)
        ended = []
        for job, (begun, good) in enumerate(self.begun):
            if good >= 0 and time.monotonic() - begun >= least:
                ended.append((job, good))
                self.begun[job] = begun, -1
        return ended

    def _fail(self, call: str) -> None:
        if self.raises == call or (self.raises and call == "close"):
            raise OSError("no such machine")


def behind_memory(reference: Any, store: Any, *overrides: str) -> tuple[EngineCore, Any]:
    """An engine with a store after the memory of another, which is returned, too."""
    engine = start(reference, *HOST, *overrides)
    (memory,) = engine.bound.kv_stores
    device: Any = engine.core._device
    engine.core.keep_records(["host", "faulty"], [memory, store], device._runner.records.num_bytes, device.store)
    return engine.core, memory


@few(8)
@pytest.mark.parametrize("how", ["at once", "late", "never", "fewer", "gone"])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_the_same_whatever_becomes_of_a_read(references: References, name: str, how: str) -> None:
    reference, store = references(name), Careless(how)
    core, memory = behind_memory(reference, store)
    answers(core, reference.requests("first"), 6)
    core.take_stored()
    for again in range(2):
        empty_pool(core)
        memory.clear()
        found, loaded = loaded_by(core, reference.turns(f"then{again}-"))
        assert tuple(answer.tokens for answer in found) == tuple(tokens[-10:] for tokens in reference.tokens)
        assert how not in ("at once", "never", "gone") or (sum(loaded.values()) > 0) == (how == "at once")
        memory.check()
    assert store.reads >= 2
    core.check_idle()
    core.close()
    memory.check()


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_prompt_that_another_engine_has_computed_waits_until_stores_hear_of_it(
    references: References, is_heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, store = references("qwen2"), Careless("at once")
    core, memory = behind_memory(reference, store)
    answers(core, reference.requests("first"), 6)
    core.take_stored()
    empty_pool(core)
    memory.clear()
    records, store.records = store.records, {}
    monkeypatch.setattr(pool, "HEARD_S", 1e3 if is_heard else 0.05)
    last = reference.turns("then")[-1]
    core.submit(EngineRequest("last", last.prompt, last.sampling, prefilled=True))
    if is_heard:
        core.step()
        assert not core._ledger and core.rest_s() > 1.0, "it did not wait"
        store.records = records
    outputs = []
    while core.has_work:
        outputs += core.step().outputs
    assert sum([out.tokens for out in outputs], ()) == reference.tokens[-1][-10:]
    assert (sum(outputs[-1].timings.loaded.values()) > 0) == is_heard
    core.close()


@pytest.mark.parametrize("call", ["has", "put", "get", "poll"])
def test_a_store_that_raises_ends_the_engine_by_its_name(references: References, call: str) -> None:
    reference = references("qwen2")
    store: Any = named(Careless("at once"), "kv_store=careless (from elsewhere)", (StagedStore,))
    core, memory = behind_memory(reference, store)
    answers(core, reference.requests("first"), 6)
    core.take_stored()
    empty_pool(core)
    memory.clear()
    store.raises = call
    inbox, sent = Inbox(), list[FromEngine]()
    for request in reference.requests("then") if call == "put" else reference.turns("then"):
        inbox.put(Submit(request))
    assert not drive(core, inbox, sent.append), "it also raises when it is closed"
    failed = sent[-1]
    assert isinstance(failed, Failed) and failed.cause == "plugin_failed"
    assert f"kv_store=careless (from elsewhere): {call}() raised OSError: no such machine" in failed.error


def test_siblings_that_may_not_run_yet_do_not_keep_the_loop_awake(references: References) -> None:
    """One API request does not take all rows: of its four sequences the last waits for the others."""
    reference, store = references("qwen2"), Careless("late")
    core, memory = behind_memory(reference, store, "scheduler.max_requests=4")
    answers(core, reference.requests("first"), 6)
    core.take_stored()
    empty_pool(core)
    memory.clear()
    core._cost.cost = lambda: SLOW  # type: ignore[method-assign]
    last = reference.turns("then")[-1]
    for number in range(4):
        core.submit(EngineRequest(f"{number}", last.prompt, last.sampling, group="one"))
    core.step()
    assert store.reads and not core._ledger
    assert core.rest_s() > 1.0
    core.close()


def test_the_records_of_the_last_step_reach_the_disk(references: References, tmp_path: Path) -> None:
    """A prompt that was computed in one step, before an engine that ends when it is done."""
    reference = references("qwen2")
    disk = (*HOST, "kv_store=[host,disk]", f"kv_store.disk.path={tmp_path}", "overlap=false")
    core = start(reference, *disk).core
    answers(core, [EngineRequest("only", reference.prompts[4][:40], SamplingParams(max_tokens=1, temperature=0.0))], 1)
    core.close()
    assert len([*tmp_path.rglob("*-0")]) == 40 // 8


def test_a_disk_that_wants_what_is_used_has_it_after_a_second_request(references: References, tmp_path: Path) -> None:
    reference, once = references("qwen2"), SamplingParams(max_tokens=1, temperature=0.0)
    disk = ("kv_store=[host,disk]", f"kv_store.disk.path={tmp_path}", "kv_store.disk.writes=used")
    core = start(reference, *HOST, *disk).core
    for name, written in (("one", 0), ("two", 39 // 8)):
        answers(core, [EngineRequest(name, reference.prompts[4][:40], once)], 1)
        while core.stats().stores[0].records < 40 // 8:
            core.take_stored()
        if name == "two":
            core.close()
        assert len([*tmp_path.rglob("*-0")]) == written


def test_memory_without_room_for_a_record_is_refused(references: References, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostStore, "memory", lambda self, group: memoryview(bytearray()))
    with pytest.raises(AssemblyError, match=r"kv_store=\[host\]: host has no room for a record of \d+ bytes; give it"):
        start(references("qwen2"), *HOST)
