"""What a drafter does at each step, as programs: the same as called with tensors, bit for bit."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.assembly.assemble import assemble
from engine.assembly.errors import AssemblyError
from engine.contracts.drafter import DraftRows, DraftTokens
from engine.contracts.request import SamplingParams
from engine.drafting.chains import CapturedChain
from engine.kernels.cpu.captured import Captured, CapturedSteps, Programs
from engine.kernels.cpu.program import NotNative, Value
from engine.kernels.metadata import ForwardMetadata
from engine.kernels.storage import stored_tensors
from engine.kv.cache import KVCache
from engine.startup.build import build_engine
from engine.startup.memory.report import describe_start
from engine_plugins.attention_kernel.torch_paged import TorchAttention
from engine_plugins.drafter.early_exit import EarlyExitDrafter
from tests.native import needs_compiler
from tests.selection import few

from ...laws import heads
from ...laws.drafted import COMMON, DRAFTERS, Models, answers, engine, prompts, requests_for

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
        tensors = (tensor for layer in kv.layers.values() for tensor in stored_tensors(layer))
        self._tensors = [tensor for tensor in tensors if tensor is not None]

    def copy(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self._tensors]

    def restore(self, copy: Sequence[Tensor]) -> None:
        for tensor, values in zip(self._tensors, copy, strict=True):
            tensor.copy_(values)

    def holds(self, copy: Sequence[Tensor]) -> bool:
        return all(torch.equal(bits(a), bits(b)) for a, b in zip(self._tensors, copy, strict=True))


def bits(tensor: Tensor) -> Tensor:
    """To compare: a NaN equals itself."""
    return tensor.contiguous().view(torch.uint8)


class Compared:
    """Every run starts from the cache and the memory that the call with tensors did not leave behind, and must come to
    the same results and the same cache. All buffers of programs are overwritten before and after."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        """What ran as programs."""
        self.caches: list[Cache] = []
        make_cache, call_function, call_chain = KVCache.__init__, Captured.__call__, CapturedChain.__call__

        def cache(kv: KVCache, *arguments: Any) -> None:
            make_cache(kv, *arguments)
            self.caches.append(Cache(kv))

        def function(called: Captured, *arguments: Tensor, metadata: ForwardMetadata) -> Any:
            steps = isinstance(getattr(called._function, "__self__", None), CapturedSteps)
            if steps or isinstance(metadata.positions, Value):
                return call_function(called, *arguments, metadata=metadata)
            plain = partial(called._function, *(argument.clone() for argument in arguments), metadata=replace(metadata))
            run = partial(call_function, called, *arguments, metadata=metadata)
            got = self._compare(called._programs, plain, run)
            self.counts[called._name] += metadata.positions.shape[0] <= len(called._written or ())
            return got

        def chain(called: CapturedChain, rows: DraftRows, hidden: Tensor | None = None) -> DraftTokens:
            if not rows.index:
                return call_chain(called, rows, hidden)
            run, plain = partial(call_chain, called, rows, hidden), partial(called._plain, rows, hidden)
            got = self._compare(called._programs, lambda: plain().tokens, lambda: run().tokens)
            assert called._written, "not captured"
            self.counts[f"{len(rows.index)} x {rows.most_draft_tokens}"] += 1
            return DraftTokens(got)

        patch.setattr(KVCache, "__init__", cache)
        patch.setattr(Captured, "__call__", function)
        patch.setattr(CapturedChain, "__call__", chain)

    def _compare(self, programs: Programs, plain: Callable[[], Any], run: Callable[[], Any]) -> Any:
        cache, buffers = self.caches[-1], programs.memory[: 1 << 20]
        before, expected = cache.copy(), plain()
        after = cache.copy()
        cache.restore(before)
        buffers.fill_(0xFF)
        got = run()
        assert cache.holds(after), "keys or values differ"
        buffers.fill_(0xFF)
        assert (got is None) == (expected is None)
        assert got is None or torch.equal(bits(got), bits(expected)), "results differ"
        return got


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Compared:
    return Compared(monkeypatch)


@few(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("drafter", "functions"),
    [
        ("eagle3", {"Eagle3Head.sync", "Eagle3Head.sync_keys"}),
        ("target", {"DraftModelDrafter._run"}),
        ("early_exit", set()),
        ("parallel_block", {"ParallelBlockDrafter._write", "ParallelBlockDrafter._filled"}),
    ],
)
def test_captured_drafts_are_those_of_calls_with_tensors(
    models: Models, drafter: str, functions: set[str], dtype: str, compared: Compared
) -> None:
    """For one and for three requests at once, which end at different times, so for several numbers of drafts."""
    cut = ("scheduler=chunked_prefill", "scheduler.token_budget=15")  # chunks of prompts after which nobody drafts
    overrides = [*DRAFTERS[drafter](models, "Qwen3"), f"model.dtype={dtype}", *FEW_REQUESTS, *cut]
    core = engine(models, "Qwen3", *overrides, "drafter.max_width=3", "kv_allocator=prefix_cache")
    for batch in (1, 3):
        answers(core, requests_for(prompts(models, "Qwen3", 5), [GREEDY]), batch)
    core.close()
    assert functions <= {name for name, count in compared.counts.items() if count}
    assert drafter == "parallel_block" or {"1 x 1", "1 x 2", "1 x 3", "3 x 3"} <= compared.counts.keys()


@pytest.mark.parametrize("part", ["functions", "chains"])
def test_keys_that_a_program_writes_to_a_wrong_slot_are_seen(
    models: Models, part: str, compared: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the comparison above is worth."""
    if part == "functions":
        fill = Programs.fill

        def elsewhere(self: Programs, metadata: ForwardMetadata) -> None:
            fill(self, replace(metadata, slot_mappings=tuple(slots + 1 for slots in metadata.slot_mappings)))

        monkeypatch.setattr(Programs, "fill", elsewhere)
    else:
        make_chain = CapturedChain.__init__

        def one_block_further(self: CapturedChain, *arguments: Any) -> None:
            make_chain(self, *arguments)
            self._chains.tables += 4  # bytes

        monkeypatch.setattr(CapturedChain, "__init__", one_block_further)
    with pytest.raises(AssemblyError, match="keys or values differ"):
        engine(models, "Llama", *DRAFTERS["eagle3"](models, "Llama"), *FEW_REQUESTS, "overlap=false")


@few(1)
@pytest.mark.parametrize(
    ("compute", "why"),
    [
        ("softmax", "it computes with torch: softmax"),
        ("add", "it computes with torch: arithmetic"),
        ("index", "it computes with torch: __getitem__"),
    ],
)
def test_a_function_that_computes_with_torch_is_called_plainly_and_the_user_hears_why(
    models: Models, compute: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drafts the same tokens, uncaptured, and start-up says which function it is and what keeps it from that."""
    eye, every = torch.eye(120), torch.arange(120)  # of the vocabulary
    following = EarlyExitDrafter._next

    def own(self: EarlyExitDrafter, tokens: Any, hidden: Tensor | None, metadata: Any) -> tuple[Tensor, None]:
        if compute == "softmax":
            tokens = torch.softmax(tokens, dim=-1) if not isinstance(tokens, Tensor) else eye[tokens].argmax(dim=-1)
        else:
            tokens = (tokens + 1) - 1 if compute == "add" else every[tokens]
        return following(self, tokens, hidden, metadata)

    drafter = (*DRAFTERS["early_exit"](models, "Llama"), "drafter.max_width=3", "drafter.adaptive=false")
    plan = assemble([f"model.path={models.path('Llama')}", *COMMON, *drafter, *FEW_REQUESTS])
    captured = build_engine(plan)
    monkeypatch.setattr(EarlyExitDrafter, "_next", own)
    plain = build_engine(plan)
    assert captured.info.notes == ()
    (note,) = plain.info.notes
    assert note.endswith(f"own runs uncaptured (slower): {why}")
    assert f"note: {note}" in describe_start(plain.info)
    got, expected = (
        answers(one.core, requests_for(prompts(models, "Llama", 2), [GREEDY]), 1) for one in (plain, captured)
    )
    assert [a.tokens for a in got] == [a.tokens for a in expected]
    accepted = [[a.timings.accepted_tokens for a in found if a.timings] for found in (got, expected)]
    assert accepted[0] == accepted[1]


def test_what_is_found_after_start_up_is_a_warning(models: Models) -> None:
    plan = assemble([f"model.path={models.path('Llama')}", *COMMON])
    programs = Programs(TorchAttention(None, None), plan.choice("kv_allocator").config["block_size"], 64, 1)  # type: ignore[arg-type]

    def refused(count: int) -> None:
        raise NotNative("it computes with torch: softmax")

    assert programs.write_all("Mine.step", refused) == []
    assert programs.notes() == ("Mine.step runs uncaptured (slower): it computes with torch: softmax",)
    with pytest.warns(UserWarning, match=r"Mine\.other runs uncaptured"):
        programs.write_all("Mine.other", refused)


def test_programs_are_written_up_to_the_number_of_tokens_that_fits() -> None:
    programs = Programs(TorchAttention(None, None), 8, 64, 1)  # type: ignore[arg-type]

    def up_to_five(count: int) -> int:
        if count > 5:
            raise NotNative("it takes too much")
        return count

    assert programs.write_all("Mine.step", up_to_five) == [1, 2, 3, 4, 5]
    assert programs.notes() == ("Mine.step of 6 or more tokens runs uncaptured (slower): it takes too much",)
