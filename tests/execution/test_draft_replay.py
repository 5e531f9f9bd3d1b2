"""What a drafter does at each step, replayed: the same as called by Python, bit for bit."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding

from engine.contracts.drafter import DraftRows, DraftTokens
from engine.contracts.request import SamplingParams
from engine.execution import row_ops
from engine.execution.draft_replay import ReplayedChain, ReplayedFunction, _RecordedChain, _RecordedFunction
from engine.execution.lowering import Memory, RotationTables, record
from engine.execution.lowering.recorder import POISON, bits
from engine.execution.places import Place
from tests.native import needs_compiler

from ..laws import heads
from ..laws.drafted import DRAFTERS, Models, answers, engine, prompts, requests_for

pytestmark = needs_compiler

GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "MLP", 96)  # bfloat16 kernels take inputs by 32
        yield Models(tmp_path_factory.mktemp("models"))


def poison(memory: Memory | None) -> None:
    assert memory is not None
    for buffer in memory.buffers:
        buffer.fill_(POISON)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Every replay is made from poisoned memory and compared with the plain call; how many there were."""
    counts: Counter[str] = Counter()
    call_function, call_chain, begin = ReplayedFunction.__call__, ReplayedChain.__call__, _RecordedChain.begin

    def function(self: ReplayedFunction, *arguments: Tensor, place: Place) -> Tensor:
        expected = self._function(*(argument.clone() for argument in arguments), place=place).clone()
        recorded = self._recorded.get(place.positions.shape[0])
        if isinstance(recorded, _RecordedFunction):
            poison(recorded.place.memory)
            counts["functions"] += 1
        got = call_function(self, *arguments, place=place)
        assert torch.equal(bits(got), bits(expected))
        return got

    def chain(self: ReplayedChain, rows: DraftRows, hidden: Tensor | None = None) -> DraftTokens:
        expected = self._plain(rows, hidden).tokens.clone()
        got = call_chain(self, rows, hidden)
        if rows.index:
            assert torch.equal(got.tokens, expected)
            assert self._recorded[len(rows.index)] is not None
            counts[f"{len(rows.index)} x {rows.width}"] += 1
        return got

    def beginning(self: _RecordedChain, rows: DraftRows, hidden: Tensor | None) -> None:
        poison(self.place.memory)
        self.drafts.fill_(-1)
        begin(self, rows, hidden)

    monkeypatch.setattr(ReplayedFunction, "__call__", function)
    monkeypatch.setattr(ReplayedChain, "__call__", chain)
    monkeypatch.setattr(_RecordedChain, "begin", beginning)
    return counts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafter", ["eagle3", "target", "early_exit"])
def test_replayed_drafts_are_those_of_plain_calls(
    models: Models, drafter: str, dtype: str, replays: Counter[str]
) -> None:
    """For one and for three requests at once, of lengths that end at different times, so of several widths."""
    overrides = [*DRAFTERS[drafter](models, "Qwen3"), f"model.dtype={dtype}", "execution=compile"]
    core = engine(models, "Qwen3", *overrides, "drafter.max_width=3", "kv_allocator=prefix_cache")
    for batch in (1, 3):
        answers(core, requests_for(prompts(models, "Qwen3", 5), [GREEDY]), batch)
    core.close()
    assert {"1 x 1", "1 x 2", "1 x 3", "3 x 3"} <= replays.keys()
    assert drafter == "early_exit" or replays["functions"] > 20


def test_a_function_that_computes_with_torch_is_called_plainly(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is one whose work nobody notes: it drafts the same tokens, unreplayed."""
    from engine_plugins.drafter.early_exit import EarlyExitDrafter

    following, calls = EarlyExitDrafter._next, Counter[str]()

    def doubled(self: EarlyExitDrafter, tokens: Tensor, hidden: Tensor | None, place: Any) -> tuple[Tensor, None]:
        calls["steps"] += 1
        return following(self, tokens * 1, hidden, place)

    plain = (*DRAFTERS["early_exit"](models, "Llama"), "execution=compile", "drafter.max_width=3")
    wanted = [requests_for(prompts(models, "Llama", 2), [GREEDY])] * 2
    expected = answers(engine(models, "Llama", *plain), wanted[0], 1)
    monkeypatch.setattr(EarlyExitDrafter, "_next", doubled)
    got = answers(engine(models, "Llama", *plain), wanted[1], 1)
    assert [a.tokens for a in got] == [a.tokens for a in expected]
    accepted = [[a.timings.accepted_tokens for a in found if a.timings] for found in (got, expected)]
    assert accepted[0] == accepted[1]
    assert calls["steps"] > 30


def run(function: Any, inputs: Sequence[Tensor]) -> tuple[Tensor, Any, Memory]:
    memory = Memory()
    results, replay = record(lambda: (function(*inputs),), inputs, memory)
    return results[0], replay, memory


TABLE = torch.arange(40, dtype=torch.float32).view(10, 4)

RECORDED = {
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
    assert torch.equal(result, function(*given)) and replay is not None
    for tensor, value in zip(inputs, other, strict=True):
        tensor.copy_(value)
    poison(memory)
    replay()
    assert torch.equal(result, function(*other))


@pytest.mark.parametrize(
    "function",
    [lambda x: x + 1, lambda x: x.sum(dim=-1), lambda x: x.argmax(dim=0), lambda x: torch.cat((x, x), dim=0)],
)
def test_other_work_of_torch_is_not_recorded(function: Any) -> None:
    x = torch.randn(3, 4)
    result, replay, memory = run(function, [x])
    assert torch.equal(result, function(x))
    assert replay is None and memory.reason is not None


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


