"""What a drafter does at each step, replayed: the same as called by Python, bit for bit."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding

from engine.assembly.assemble import assemble
from engine.contracts.drafter import DraftRows, DraftTokens
from engine.contracts.request import SamplingParams
from engine.execution import row_ops
from engine.execution.draft_replay import ReplayedChain, ReplayedFunction, _RecordedChain, _RecordedFunction
from engine.execution.kv_cache import KVCache
from engine.execution.lowering import (
    Memory,
    NotRecorded,
    Recordings,
    ReplayedLayers,
    RotationTables,
    Table,
    record,
)
from engine.execution.lowering.recorder import bits
from engine.execution.lowering.recordings import Arena
from engine.execution.places import Place
from engine.loop.build import build_engine
from engine.loop.memory.report import describe_start
from engine_plugins.drafter.early_exit import EarlyExitDrafter
from tests.native import needs_compiler

from ..laws import heads
from ..laws.drafted import COMMON, DRAFTERS, Models, answers, engine, prompts, requests_for

pytestmark = needs_compiler

FEW_REQUESTS = ("execution=compile", "scheduler.max_requests=3")
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "MLP", 96)  # bfloat16 kernels take inputs by 32
        yield Models(tmp_path_factory.mktemp("models"))


class Cache:
    """All keys and values of an engine, as they are and as they were."""

    def __init__(self, kv: KVCache) -> None:
        layers = (kv.layer(i) for i in range(len(kv._keys)))
        self._tensors = [tensor for layer in layers for tensor in layer if tensor is not None]

    def copy(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self._tensors]

    def restore(self, copy: Sequence[Tensor]) -> None:
        for tensor, values in zip(self._tensors, copy, strict=True):
            tensor.copy_(values)

    def holds(self, copy: Sequence[Tensor]) -> bool:
        return all(torch.equal(bits(a), bits(b)) for a, b in zip(self._tensors, copy, strict=True))


class Compared:
    """Every replay starts from the cache and the memory that the plain call did not leave behind, and must come to the
    same results and the same cache. All that recordings allocate is overwritten before and after."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        """Calls whose work was recorded."""
        self.caches: list[Cache] = []
        make_cache = KVCache.__init__
        call_function, call_chain, run_layers = ReplayedFunction.__call__, ReplayedChain.__call__, ReplayedLayers.run

        def cache(kv: KVCache, *arguments: Any) -> None:
            make_cache(kv, *arguments)
            self.caches.append(Cache(kv))

        def function(called: ReplayedFunction, *arguments: Tensor, place: Place) -> Tensor:
            if place.memory is not None:
                return call_function(called, *arguments, place=place)
            arena, count = called._replaying.recordings.arena, place.positions.shape[0]
            plain = partial(called._function, *(argument.clone() for argument in arguments), place=replace(place))
            got = self._compare(arena, lambda: [plain()], lambda: [call_function(called, *arguments, place=place)])[0]
            self.counts["functions"] += called._recorded.has(count)
            return got

        def chain(called: ReplayedChain, rows: DraftRows, hidden: Tensor | None = None) -> DraftTokens:
            count, arena = len(rows.index), called._replaying.recordings.arena
            if not count:
                return call_chain(called, rows, hidden)
            drafts = partial(call_chain, called, rows, hidden)
            got = self._compare(arena, lambda: [called._plain(rows, hidden).tokens], lambda: [drafts().tokens])[0]
            assert called._recorded.has(count), "not replayed"
            self.counts[f"{count} x {rows.width}"] += 1
            return DraftTokens(got)

        def layers(called: ReplayedLayers, *arguments: Any) -> Any:
            called._arena.poison()
            done = run_layers(called, *arguments)
            called._arena.poison()
            return done

        patch.setattr(KVCache, "__init__", cache)
        patch.setattr(ReplayedFunction, "__call__", function)
        patch.setattr(ReplayedChain, "__call__", chain)
        patch.setattr(ReplayedLayers, "run", layers)

    def _compare(
        self, arena: Arena, plain: Callable[[], list[Tensor]], replayed: Callable[[], list[Tensor]]
    ) -> list[Tensor]:
        cache = self.caches[-1]
        before = cache.copy()
        with pytest.MonkeyPatch.context() as patch:  # layers that are called plainly may be recordings themselves
            patch.setattr(ReplayedLayers, "may_run", lambda *_: False)
            expected = [result.clone() for result in plain()]
        after = cache.copy()
        cache.restore(before)
        arena.poison()
        got = replayed()
        assert cache.holds(after), "keys or values differ"
        arena.poison()
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, expected, strict=True))
        return got


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Compared:
    return Compared(monkeypatch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafter", ["eagle3", "target", "early_exit"])
def test_replayed_drafts_are_those_of_plain_calls(
    models: Models, drafter: str, dtype: str, compared: Compared
) -> None:
    """For one and for three requests at once, of lengths that end at different times, so of several widths."""
    overrides = [*DRAFTERS[drafter](models, "Qwen3"), f"model.dtype={dtype}", *FEW_REQUESTS]
    core = engine(models, "Qwen3", *overrides, "drafter.max_width=3", "kv_allocator=prefix_cache")
    for batch in (1, 3):
        answers(core, requests_for(prompts(models, "Qwen3", 5), [GREEDY]), batch)
    core.close()
    assert {"1 x 1", "1 x 2", "1 x 3", "3 x 3"} <= compared.counts.keys()
    assert drafter == "early_exit" or compared.counts["functions"] > 20


@pytest.mark.parametrize("part", ["functions", "chains"])
def test_keys_that_a_replay_writes_to_a_wrong_slot_are_seen(
    models: Models, part: str, compared: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the comparison above is worth."""
    if part == "functions":
        record_function = ReplayedFunction._record

        def elsewhere(self: ReplayedFunction, *arguments: Any) -> _RecordedFunction:
            found = record_function(self, *arguments)
            *_, slot_mapping, _result = found.held

            def fill(given: Sequence[Tensor]) -> None:
                found.fill(given)
                slot_mapping.add_(1)

            return replace(found, fill=fill)  # type: ignore[arg-type]

        monkeypatch.setattr(ReplayedFunction, "_record", elsewhere)
    else:
        make_chain = _RecordedChain.__init__

        def one_block_further(self: _RecordedChain, *arguments: Any) -> None:
            make_chain(self, *arguments)
            self.chains.tables += self.place.attention.block_tables.element_size()

        monkeypatch.setattr(_RecordedChain, "__init__", one_block_further)
    with pytest.raises(RuntimeError, match="keys or values differ"):
        engine(models, "Llama", *DRAFTERS["eagle3"](models, "Llama"), *FEW_REQUESTS, "overlap=false")


@pytest.mark.parametrize("compute", ["softmax", "argmax"])
def test_a_function_that_computes_with_torch_is_called_plainly_and_the_user_hears_why(
    models: Models, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drafts the same tokens, unreplayed, and start-up says which function it is and what keeps it from that."""
    eye = torch.eye(120)  # of the vocabulary
    following, calls = EarlyExitDrafter._next, Counter[str]()

    def weighed(self: EarlyExitDrafter, tokens: Tensor, hidden: Tensor | None, place: Any) -> tuple[Tensor, None]:
        calls["steps"] += 1
        weights = embedding(tokens, eye)
        if compute == "softmax":
            weights = torch.softmax(weights, dim=-1)
        return following(self, torch.argmax(input=weights, dim=-1), hidden, place)

    drafter = (*DRAFTERS["early_exit"](models, "Llama"), "drafter.max_width=3", "drafter.adaptive=false")
    plan = assemble([f"model.path={models.path('Llama')}", *COMMON, *drafter, *FEW_REQUESTS])
    recorded = build_engine(plan)
    monkeypatch.setattr(EarlyExitDrafter, "_next", weighed)
    plain = build_engine(plan)
    assert recorded.info.notes == ()
    (note,) = plain.info.notes
    assert "weighed is not always replayed" in note and note.endswith(f": {compute} in a recorded function")
    assert f"note: {note}" in describe_start(plain.info)
    got, expected = (
        answers(one.core, requests_for(prompts(models, "Llama", 2), [GREEDY]), 1) for one in (plain, recorded)
    )
    assert [a.tokens for a in got] == [a.tokens for a in expected]
    accepted = [[a.timings.accepted_tokens for a in found if a.timings] for found in (got, expected)]
    assert accepted[0] == accepted[1]
    assert calls["steps"] > 30


def test_what_is_found_after_start_up_is_a_warning() -> None:
    recordings = Recordings()
    table: Table[int, Any] = recordings.table("Mine.step")

    def refused() -> Any:
        raise NotRecorded("softmax in a recorded function")

    assert table.find(1, refused) is None and not table.may(1) and table.may(2)
    assert not table.has(1) and not table.has(2), "refused, and never tried"
    assert recordings.notes() == (
        "Mine.step is not always replayed, and each call that is not costs what Python and torch add: "
        "softmax in a recorded function",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said already
        assert table.find(2, refused) is None
    other: Table[int, Any] = recordings.table("Mine.other")
    with pytest.warns(UserWarning, match=r"Mine\.other is not always replayed"):
        assert other.find(1, refused) is None


def test_recordings_take_together_what_the_largest_takes() -> None:
    recordings = Recordings()
    table = torch.randn(10, 1000)

    def record_rows(count: int) -> None:
        memory, index = Memory(recordings.arena), torch.arange(count)
        record(lambda: [memory.kept(embedding(index, table).argmax(-1))], (), memory)

    record_rows(4)
    assert 4 * 4000 <= recordings.num_bytes <= 4 * 4000 + 200
    for count in (1, 10, 3, 10):
        record_rows(count)
    assert 10 * 4000 <= recordings.num_bytes <= 10 * 4000 + 200


def test_more_than_the_arena_has_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.execution.lowering.recordings.ARENA_BYTES", 1000)
    with pytest.raises(NotRecorded, match="it takes 1200 bytes, at most 1000"):
        run(lambda i: embedding(i, TABLE).unsqueeze(0), [torch.arange(75) % 10])


def run(function: Any, inputs: Sequence[Tensor]) -> tuple[Tensor, Any, Memory]:
    memory = Memory(Arena())
    results, replay = record(lambda: (function(*inputs),), inputs, memory)
    return results[0], replay, memory


TABLE = torch.arange(40, dtype=torch.float32).view(10, 4)

RECORDED: dict[str, tuple[Any, list[Tensor], list[Tensor]]] = {
    "embedding": (lambda i: embedding(i, TABLE), [torch.tensor([3, 9, 0])], [torch.tensor([1, 1, 5])]),
    "look-up": (lambda i: TABLE[i], [torch.tensor([3, 9])], [torch.tensor([0, 4])]),
    "cat": (lambda a, b: torch.cat((a, b), dim=-1), [TABLE[:2].clone(), TABLE[4:6].clone()], [TABLE[7:9], TABLE[:2]]),
    "argmax": (lambda x: x.argmax(dim=-1), [torch.randn(3, 50)], [torch.randn(3, 50)]),
    "argmax of equals": (lambda x: x.argmax(dim=-1), [torch.ones(2, 9)], [torch.zeros(2, 9).bfloat16().float()]),
    "float": (lambda x: x.float().argmax(-1), [torch.randn(2, 33).bfloat16()], [torch.randn(2, 33).bfloat16()]),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_recorded_of_torch_computes_the_same_of_other_inputs(name: str) -> None:
    function, given, other = RECORDED[name]
    inputs = [tensor.clone() for tensor in given]
    result, replay, memory = run(function, inputs)
    assert torch.equal(result, function(*given))
    for tensor, value in zip(inputs, other, strict=True):
        tensor.copy_(value)
    memory.poison()
    replay()
    assert torch.equal(result, function(*other))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1,
        lambda x: x.sum(dim=-1),
        lambda x: x.argmax(dim=0),
        lambda x: torch.cat((x, x), dim=0),
        lambda x: torch.cat(tensors=(x, x), dim=-1),
        lambda x: torch.argmax(input=x, dim=-1),
        lambda x: torch.argmax(x, -1, out=torch.empty(3, dtype=torch.int64)),
        lambda x: torch.reshape(input=x, shape=(4, 3)),
        lambda x: torch.embedding(TABLE, indices=x[0].long().clamp(0, 9)),
    ],
)
def test_other_work_of_torch_is_not_recorded(function: Any) -> None:
    with pytest.raises(NotRecorded, match="in a recorded function"):
        run(function, [torch.randn(3, 4)])


def test_an_index_outside_of_a_table_reads_nothing() -> None:
    out = torch.zeros(3, 4)
    row_ops.gather(TABLE, torch.tensor([2, -1, 10]), out)
    assert torch.equal(out[0], TABLE[2]) and out[1:].isnan().all()


def test_rotations_looked_up_are_those_computed() -> None:
    frequencies = torch.rand(16)

    def rotate(positions: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        angles = (positions[:, None].float() * frequencies)[:, None]
        return ((angles.cos(), angles.sin()),)

    tables = RotationTables(rotate, 1000)
    for length in (5, 257, 1000):
        tables.reach(length)
        positions = torch.tensor([0, length - 1, length // 2])
        for got, want in zip(tables(positions)[0], rotate(positions)[0], strict=True):
            assert torch.equal(got, want)
    with pytest.raises(ValueError, match="position 1000, expected less than 1000"):
        tables.reach(1001)


