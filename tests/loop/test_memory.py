"""Memory is estimated before loading, refused with advice that works, and accounted for afterwards."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine.assembly.discovery import Discovered, discover
from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan
from engine.contracts.config import QuantizerConfig
from engine.contracts.model import DeviceFacts, ModelFacts
from engine.contracts.request import EngineRequest, SamplingParams
from engine.execution.checkpoint import CheckpointError, open_checkpoint
from engine.execution.cpu_memory import give_back_freed_memory
from engine.loop.build import build_engine, load_plan
from engine.loop.memory.fit import MemoryPlan, plan_memory, size_pool
from engine.loop.memory.judge import Judge
from engine.loop.memory.remedies import remedies
from engine.loop.memory.report import describe_ledger, describe_start
from engine.loop.memory.room import DoesNotFit, Meter, Room, free_memory
from engine.loop.memory.text import size
from engine_plugins.quantizer.config import Int8Config
from tests.execution import tiny
from tests.native import needs_compiler

GIB = 2**30
QUIET = ("device=cpu", "threads=1", "exporter=[]")


def plan_of(folder: Path, *overrides: str) -> EnginePlan:
    return assemble([f"model.path={folder}", *QUIET, *overrides])


def planned(plan: EnginePlan, free: int = 64 * GIB) -> MemoryPlan:
    return plan_memory(plan, bind(plan), free=free)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("model"))


def variant(folder: Path, family: str, tied: bool, stored: torch.dtype) -> Path:
    tensors = tiny.weights()
    if tied:
        del tensors["lm_head.weight"]
    for i in range(3):
        name = f"model.layers.{i}.self_attn"
        if family == "Qwen2ForCausalLM":
            tensors |= {f"{name}.{part}_proj.bias": torch.ones(64 if part == "q" else 32) for part in "qkv"}
        if family == "Qwen3ForCausalLM":
            tensors |= {f"{name}.{part}_norm.weight": torch.ones(16) for part in "qk"}
    kept = {name: tensor.to(stored) for name, tensor in tensors.items()}
    return tiny.write(folder, kept, architectures=[family], tie_word_embeddings=tied)


@pytest.mark.parametrize("execution", ["eager", "auto"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_the_estimate_of_the_weights_is_what_they_take(
    tmp_path: Path, family: str, tied: bool, dtype: str, execution: str
) -> None:
    folder = variant(tmp_path, family, tied, torch.bfloat16 if tied else torch.float32)
    plan = plan_of(folder, f"model.dtype={dtype}", f"execution={execution}")
    bound = bind(plan)
    taken = load_plan(plan, bound).weights_bytes
    assert abs(plan_memory(plan, bound, free=GIB).needs.weights - taken) <= 0.02 * taken


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_quantizer_that_shrinks_weights_says_so(model: Path, dtype: str) -> None:
    plan = plan_of(model, "quantizer=int8", f"model.dtype={dtype}")
    bound = bind(plan)
    taken = load_plan(plan, bound).weights_bytes
    assert abs(plan_memory(plan, bound, free=GIB).needs.weights - taken) <= 0.02 * taken
    assert taken < planned(plan_of(model, f"model.dtype={dtype}")).needs.weights


class Silent:
    """A quantizer that does not say what its packed weights take."""

    lossless = True

    def __init__(self, inner: Any) -> None:
        self.stored, self.pack = inner.stored, inner.pack


def test_of_a_quantizer_that_does_not_say_the_stored_tensors_are_counted(model: Path) -> None:
    plan = plan_of(model, "model.dtype=bfloat16", "execution=eager")
    bound = bind(plan)
    silent = replace(bound, quantizer=Silent(bound.quantizer))
    assert plan_memory(plan, silent, free=GIB).needs.weights == plan_memory(plan, bound, free=GIB).needs.weights


def test_the_estimate_reads_no_weights(model: Path, tmp_path: Path) -> None:
    """Only the header is there: the data is a hole of the right size."""
    whole = (model / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    folder = tiny.write(tmp_path)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(whole[:header])
        file.truncate(len(whole))
    assert planned(plan_of(folder)).needs == planned(plan_of(model)).needs


def test_a_damaged_header_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path)
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        planned(plan_of(folder))


def refused(plan: EnginePlan, free: int) -> str:
    with pytest.raises(DoesNotFit) as refusal:
        planned(plan, free)
    return str(refusal.value)


def suggestions(text: str) -> list[list[str]]:
    """The overrides of each numbered line."""
    return [line.split() for line in re.findall(r"^  \d+\. (.*?)  \(", text, re.MULTILINE)]


def shares(plan: EnginePlan) -> tuple[int, ...]:
    """Amounts of free memory from next to nothing to just too little."""
    smallest = planned(plan).needs.smallest
    return tuple(int(smallest / 0.9 * share) for share in (0.7, 0.95, 0.999))


LONG = ("model.max_len=256", "scheduler.token_budget=128", "model.dtype=float32")
BASES = {
    "long requests": LONG,
    "a large pool": (*LONG, "memory.kv_tokens=100000"),
    "large steps": ("model.max_len=32", "scheduler.max_requests=64", "scheduler.token_budget=4096"),
    "heavy weights": ("model.max_len=48", "scheduler.max_requests=2", "scheduler.token_budget=80"),
}


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its weights weigh more than what a process takes anyway: 40 MB of zeros, which take no disk."""
    size = 2048
    tensors = tiny.weights() | {
        "model.embed_tokens.weight": torch.zeros(20000, 64),
        "lm_head.weight": torch.zeros(20000, 64),
    }
    for i in range(3):
        name = f"model.layers.{i}.mlp"
        tensors[f"{name}.gate_proj.weight"] = tensors[f"{name}.up_proj.weight"] = torch.zeros(size, 64)
        tensors[f"{name}.down_proj.weight"] = torch.zeros(64, size)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    folder = tmp_path_factory.mktemp("heavy")
    return tiny.write(folder, tensors, vocab_size=20000, intermediate_size=size)


@pytest.mark.parametrize("base", BASES)
def test_every_suggestion_makes_the_model_fit(heavy: Path, base: str) -> None:
    found = 0
    for free in shares(plan_of(heavy, *BASES[base])):
        text = refused(plan_of(heavy, *BASES[base]), free)
        offered = suggestions(text)
        assert bool(offered) != ("No setting makes this model fit here." in text)
        for overrides in offered:
            plan = plan_of(heavy, *BASES[base], *overrides)
            memory = planned(plan, free)  # raises if it does not fit
            assert size(memory.needs.smallest) in text
            found += 1
    assert found >= 2, "no amount of memory led to a suggestion"


def test_combinations_come_only_where_no_single_override_suffices_and_hold_nothing_superfluous(heavy: Path) -> None:
    plan = plan_of(heavy, *LONG)
    bound, smallest, installed = bind(plan), planned(plan).needs.smallest, discover(plan.settings.plugins)
    checkpoint = open_checkpoint(plan.model.path)
    lengths = set()
    for percent in range(98, 10, -8):
        judge = Judge(bound, checkpoint, smallest * percent // 100)
        found = remedies(plan, judge, installed)
        lengths |= {min(len(remedy.overrides), 3) for remedy in found} or {0}
        assert len({len(remedy.overrides) == 1 for remedy in found}) <= 1, "single overrides beside combinations"
        for remedy in found[:1]:
            if len(remedy.overrides) > 1:
                planned(plan_of(heavy, *LONG, *remedy.overrides), judge.free)
                for left_out in remedy.overrides:
                    rest = [override for override in remedy.overrides if override != left_out]
                    refused(plan_of(heavy, *LONG, *rest), judge.free)
    assert lengths == {0, 1, 2, 3}, "not every kind of answer was met"


def test_a_number_is_the_largest_that_fits(heavy: Path) -> None:
    plan = plan_of(heavy, *LONG)
    needs = planned(plan).needs
    free = int((needs.smallest - 3 * needs.block_bytes) / 0.9)
    (length,) = [int(o[0].partition("=")[2]) for o in suggestions(refused(plan, free)) if "max_len" in o[0]]
    assert length % 16 == 0 and planned(plan_of(heavy, *LONG[1:], f"model.max_len={length}"), free)
    with pytest.raises(DoesNotFit):
        planned(plan_of(heavy, *LONG[1:], f"model.max_len={length + 16}"), free)


def test_the_smallest_loss_comes_first(heavy: Path) -> None:
    plan = plan_of(heavy, *LONG)
    free = int(planned(plan).needs.smallest / 0.9 * 0.999)
    keys = [override.partition("=")[0] for (override,) in suggestions(refused(plan, free))]
    order = ["memory.fraction", "model.max_len", "scheduler.max_requests", "scheduler.token_budget", "model.dtype"]
    assert keys[0] == "memory.fraction" and "quantizer" in keys
    assert [key for key in keys if key in order] == [key for key in order if key in keys]
    assert keys.index("quantizer") == max(index for index, key in enumerate(keys) if key != "quantizer") + 1


def test_a_refusal_says_what_each_part_takes_and_what_is_missing(heavy: Path) -> None:
    plan = plan_of(heavy, *LONG)
    needs = planned(plan).needs
    free = needs.smallest // 2
    text = refused(plan, free)
    missing = needs.smallest - Room(free, 0.9).budget
    for amount in (needs.smallest, needs.weights, free, missing, needs.smallest_blocks * needs.block_bytes):
        assert size(amount) in text
    assert "memory.fraction=0.9" in text and "Nothing was loaded" in text


def test_only_plugins_that_can_serve_the_model_are_suggested(heavy: Path) -> None:
    """Discovery is asked, and says which quantizers there are: with none, none is suggested."""
    plan = plan_of(heavy, *LONG)
    judge = Judge(bind(plan), open_checkpoint(plan.model.path), int(planned(plan).needs.smallest / 0.9 * 0.999))
    some = remedies(plan, judge, discover(plan.settings.plugins))
    none = remedies(plan, judge, Discovered())
    assert any("quantizer=" in override for remedy in some for override in remedy.overrides)
    assert none and not any("quantizer=" in override for remedy in none for override in remedy.overrides)


@dataclass(frozen=True)
class Demanding(QuantizerConfig):
    """Has a setting without a default."""

    must: int = field(kw_only=True)


@dataclass(frozen=True)
class Unwilling(Int8Config):
    def unsupported(self, model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
        return ("not with these values",)


def broken(model: ModelFacts, device: DeviceFacts) -> tuple[str, ...]:
    raise RuntimeError("a fault of theirs")


def with_quantizer(installed: Discovered, **parts: Any) -> Discovered:
    """``installed`` and one more plugin, of somebody else."""
    (int8,) = installed.named("quantizer", "int8")
    offer = replace(int8, provider=replace(int8.provider, name="theirs", **parts))
    return replace(installed, offers=(*installed.offers, offer))


def test_a_plugin_that_cannot_even_be_asked_is_named_and_the_others_are_suggested(heavy: Path) -> None:
    plan = plan_of(heavy, *LONG)
    free = int(planned(plan).needs.smallest / 0.9 * 0.999)
    installed = with_quantizer(discover(plan.settings.plugins), unsupported=broken)
    with pytest.raises(DoesNotFit) as refusal:
        plan_memory(plan, bind(plan), free=free, discovered=installed)
    text = str(refusal.value)
    assert re.search(r"\nquantizer=theirs was not tried: asking .* raised RuntimeError: a fault of theirs$", text)
    assert ["quantizer=int8"] in suggestions(text)


@pytest.mark.parametrize(("config", "goes"), [(Int8Config, True), (Demanding, False), (Unwilling, False)])
def test_a_plugin_is_suggested_if_its_settings_go_with_the_plan(heavy: Path, config: Any, goes: bool) -> None:
    plan = plan_of(heavy, *LONG)
    judge = Judge(bind(plan), open_checkpoint(plan.model.path), int(planned(plan).needs.smallest / 0.9 * 0.999))
    notes: list[str] = []
    found = remedies(plan, judge, with_quantizer(discover(plan.settings.plugins), config=config), notes.append)
    offered = [override for remedy in found for override in remedy.overrides]
    assert "quantizer=int8" in offered and ("quantizer=theirs" in offered) == goes and not notes


def test_a_selected_plugin_with_a_setting_that_must_be_made_does_not_stop_the_advice(heavy: Path) -> None:
    plan = plan_of(heavy, *LONG)
    choice = plan.choice("quantizer")
    theirs = replace(choice, config_class=f"{__name__}:Demanding", config={"activations": "bf16", "must": 3})
    judge = Judge(bind(plan), open_checkpoint(plan.model.path), int(planned(plan).needs.smallest / 0.9 * 0.999))
    judged = replace(plan, slots={**plan.slots, "quantizer": (theirs,)})
    judge.bound = replace(judge.bound, plan=judged)
    offered = [override for remedy in remedies(judged, judge, discover(plan.settings.plugins)) for override in
               remedy.overrides]  # fmt: skip
    assert "quantizer=int8" in offered


def test_nothing_is_loaded_when_it_does_not_fit(heavy: Path) -> None:
    phases: list[str] = []
    with pytest.raises(AssemblyError, match="does not fit"):
        build_engine(plan_of(heavy), lambda progress: phases.append(progress.phase), free=lambda device: 2**20)
    assert phases and "load weights" not in phases


def test_memory_that_is_gone_after_loading_stops_the_start_with_numbers(model: Path) -> None:
    memory = planned(plan_of(model))
    with pytest.raises(DoesNotFit, match="another process took memory meanwhile"):
        size_pool(memory, memory.needs.weights, free_now=memory.room.headroom)


def test_the_pool_takes_what_requests_can_use_and_no_more_than_fits(model: Path) -> None:
    plan = plan_of(model, "model.max_len=64", "scheduler.max_requests=4")
    memory = planned(plan)
    rich = size_pool(memory, memory.needs.weights, free_now=64 * GIB)
    assert (rich.blocks, rich.max_len, rich.notes) == (4 * 4 + 1, 64, ())
    needs = memory.needs
    tight = planned(plan, free=int((needs.smallest + 2 * needs.block_bytes) / 0.9))
    pool = size_pool(tight, needs.weights, free_now=tight.room.free - needs.weights)
    assert needs.smallest_blocks <= pool.blocks <= needs.smallest_blocks + 3
    assert needs.total(pool.blocks) <= tight.room.budget


def test_a_pool_smaller_than_a_request_shortens_requests_and_says_so(model: Path) -> None:
    plan = plan_of(model, "model.max_len=128", "memory.kv_tokens=60")
    engine = build_engine(plan)
    try:
        assert engine.info.max_len == 64
        (note,) = engine.info.notes
        assert "64 tokens" in note and "model.max_len=128" in note and "memory.kv_tokens=60" in note
        assert note in describe_start(engine.info)
    finally:
        engine.core.close()


def test_the_ledger_holds_estimate_and_measurement_and_adds_up(heavy: Path) -> None:
    plan = plan_of(heavy, "model.max_len=64", "model.dtype=float32")
    give_back_freed_memory()  # what earlier tests left would be used again, and nothing would seem to be taken
    engine = build_engine(plan)
    try:
        info, ledger = engine.info, engine.info.ledger
        assert ledger is not None
        lines = {line.name: line for line in ledger.lines}
        for name in ("weights", "KV pool", "tables"):
            planned_bytes, measured = lines[name].planned_bytes, lines[name].measured_bytes
            assert measured is not None and abs(planned_bytes - measured) <= 0.02 * measured + 64, name
        sizes = {name: line.planned_bytes for name, line in lines.items()}
        shared = max(sizes.pop("loading peak"), sizes.pop("workspace"))
        assert ledger.total_bytes == sum(sizes.values()) + shared
        assert ledger.headroom_bytes == ledger.free_bytes - ledger.total_bytes > 0
        assert [phase.name for phase in info.phases][-1] == "warm up"
        assert ledger.peak_so_far_bytes >= info.phases[-1].held_bytes > info.weights_bytes / 2
        text = describe_ledger(ledger)
        assert all(line.name in text for line in ledger.lines if line.planned_bytes)
    finally:
        engine.core.close()


@needs_compiler
@pytest.mark.parametrize("drafter", ["none", "early_exit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_estimate_covers_recordings_of_all_numbers_of_tokens(heavy: Path, drafter: str, dtype: str) -> None:
    """One line of the ledger, whose measurement at start-up is of few numbers of tokens."""
    plan = plan_of(heavy, *LONG[:2], f"model.dtype={dtype}", f"drafter={drafter}", "execution=compile")
    engine = build_engine(plan)
    try:
        assert engine.info.ledger is not None
        (line,) = (line for line in engine.info.ledger.lines if line.name == "recordings")
        assert line.measured_bytes is not None and 0 < line.measured_bytes < line.planned_bytes
        for batch in range(1, 17):
            for i in range(batch):
                sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
                engine.core.submit(EngineRequest(f"{batch}-{i}", (1, 2, 3), sampling))
            while engine.core.has_work:
                engine.core.step()
        steps = engine.core._device._runner.model.small_steps
        assert steps is not None and line.measured_bytes < steps.recordings.num_bytes <= line.planned_bytes
    finally:
        engine.core.close()


@pytest.mark.parametrize("override", ["execution=eager", "kv_format=int8"])
def test_where_nothing_is_replayed_no_memory_is_set_aside_for_it(model: Path, override: str) -> None:
    assert planned(plan_of(model, override)).needs.recordings == 0 < planned(plan_of(model)).needs.recordings


def test_free_memory_is_no_more_than_the_device_has(model: Path) -> None:
    device = plan_of(model).device
    assert 0 < free_memory(device) <= device.memory_bytes
    assert free_memory(replace(device, memory_bytes=12345)) == 12345


def test_the_meter_sees_memory_that_is_written_and_forgets_peaks() -> None:
    give_back_freed_memory()  # else the block may lie where an earlier test's lay
    meter = Meter("cpu")
    block = torch.ones(32 * 2**20, dtype=torch.uint8)
    held = meter.used() - meter.start
    assert held >= 30 * 2**20 and meter.peak() >= meter.used() - 2**20
    del block
    give_back_freed_memory()  # an engine that ran in this process may have had freed memory kept
    if meter.reset_peak():
        assert meter.peak() <= meter.start + held // 2
