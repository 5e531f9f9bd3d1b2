"""Memory is estimated before loading, refused with hints that work, and accounted for afterwards."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
import torch

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan
from engine.checkpoint.tensors import CheckpointError
from engine.contracts.kv_allocator import FEWEST_BLOCKS
from engine.contracts.request import EngineRequest, SamplingParams
from engine.kernels.cpu.memory import give_back_freed_memory
from engine.loop.messages import EngineInfo
from engine.startup.build import build_engine
from engine.startup.memory.budget import Budget, DoesNotFit, Meter, free_memory
from engine.startup.memory.estimate import MemoryPlan
from engine.startup.memory.fit import plan_memory, size_pool
from engine.startup.memory.report import describe_ledger, describe_start, size
from engine.startup.rank import load_plan
from tests.kernels import tiny
from tests.native import needs_compiler
from tests.plugins.architecture import test_recurrent_families as recurrent
from tests.plugins.quantizer.checkpoint.mixtures import write_mixture
from tests.plugins.quantizer.checkpoint.writers import CASES
from tests.selection import few

GIB = 2**30
QUIET = ("device=cpu", "threads=1", "exporter=[]")


def plan_of(folder: Path, *overrides: str) -> EnginePlan:
    return assemble([f"model.path={folder}", *QUIET, *overrides])


def planned(plan: EnginePlan, free: int = 64 * GIB) -> MemoryPlan:
    return plan_memory(plan, bind(plan), free=free)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("model"))


@few(4)
@pytest.mark.parametrize("execution", ["eager", "auto"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_the_estimate_of_the_weights_is_what_they_take(
    tmp_path: Path, family: str, tied: bool, dtype: str, execution: str
) -> None:
    folder = tiny.variant(tmp_path, family, tied, torch.bfloat16 if tied else torch.float32)
    plan = plan_of(folder, f"model.dtype={dtype}", f"execution={execution}")
    bound = bind(plan)
    taken = load_plan(plan, bound).weights_bytes
    assert abs(plan_memory(plan, bound, free=GIB).estimate.weights - taken) <= 0.02 * taken


@few(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_quantizer_that_shrinks_weights_says_so(model: Path, dtype: str) -> None:
    plan = plan_of(model, "quantizer=int8", f"model.dtype={dtype}")
    bound = bind(plan)
    taken = load_plan(plan, bound).weights_bytes
    assert abs(plan_memory(plan, bound, free=GIB).estimate.weights - taken) <= 0.02 * taken
    assert taken < planned(plan_of(model, f"model.dtype={dtype}")).estimate.weights


@few(2)
@needs_compiler
@pytest.mark.parametrize("quantizer", ["checkpoint", "int4"])
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_experts_routers_and_absorbed_projections_are_counted(tmp_path: Path, family: str, quantizer: str) -> None:
    quantized, dense = write_mixture(tmp_path, CASES["fp8 block"], family)
    plan = plan_of(dense if quantizer == "int4" else quantized, f"quantizer={quantizer}")
    bound = bind(plan)
    taken = load_plan(plan, bound).weights_bytes
    assert abs(plan_memory(plan, bound, free=GIB).estimate.weights - taken) <= 0.02 * taken


def test_the_estimate_reads_no_weights(model: Path, tmp_path: Path) -> None:
    """Only the header is there: the data is a hole of the right size."""
    whole = (model / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    folder = tiny.write(tmp_path)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(whole[:header])
        file.truncate(len(whole))
    assert planned(plan_of(folder)).estimate == planned(plan_of(model)).estimate


def test_a_damaged_header_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path)
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        planned(plan_of(folder))


def refused(plan: EnginePlan, free: int) -> str:
    with pytest.raises(DoesNotFit) as refusal:
        planned(plan, free)
    return str(refusal.value)


def hint_lines(text: str) -> list[list[str]]:
    """Overrides of each line that is said to make the model fit."""
    return [line.strip().split("  ")[0].split() for line in text.partition("make it fit:\n")[2].splitlines()]


def hints(text: str) -> dict[str, list[str]]:
    """Those of the first line of each key."""
    return {overrides[0].partition("=")[0]: overrides for overrides in reversed(hint_lines(text))}


LONG = ("model.max_len=256", "scheduler.token_budget=128", "model.dtype=float32")


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


@few(4)
@pytest.mark.parametrize(
    "share", [0.05, 0.45, 0.7, 0.999, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.3, 0.95))]
)
@pytest.mark.parametrize("base", [LONG, (*LONG, "memory.kv_tokens=100000"), (*LONG, "quantizer=int8")])
def test_every_hint_makes_the_model_fit(heavy: Path, base: tuple[str, ...], share: float) -> None:
    free = int(planned(plan_of(heavy, *base)).estimate.smallest * share / 0.9)
    text = refused(plan_of(heavy, *base), free)
    assert bool(hints(text)) != ("use a smaller model" in text)
    for overrides in hint_lines(text):
        planned(plan_of(heavy, *base, *overrides), free)  # raises if it does not fit


def test_hints_come_from_the_smallest_loss_to_the_largest(heavy: Path) -> None:
    plan = plan_of(heavy, *LONG)
    lines = hint_lines(refused(plan, int(planned(plan).estimate.smallest / 0.9 * 0.999)))
    assert [line[0].partition("=")[0] for line in lines[:2]] == ["memory.fraction", "model.max_len"]
    assert lines[2:] == [["quantizer=fp8"], ["quantizer=int8"], ["quantizer=int4"]], "every format that fits"


def test_the_length_of_a_hint_is_the_largest_of_whole_blocks_whose_pool_fits(heavy: Path) -> None:
    plan = plan_of(heavy, *LONG)
    estimate = planned(plan).estimate
    free = int((estimate.smallest - 3 * estimate.pool.block_bytes[0]) / 0.9) + 1
    assert hints(refused(plan, free))["model.max_len"] == [f"model.max_len={256 - 3 * 16}"]


def test_a_quantizer_of_fewer_bits_is_taken_where_more_are_not_enough(heavy: Path) -> None:
    plan = plan_of(heavy, *LONG)
    in_8_bits = planned(plan_of(heavy, *LONG, "quantizer=int8")).estimate
    in_4_bits = planned(plan_of(heavy, *LONG, "quantizer=int4")).estimate
    between = (in_8_bits.smallest + in_4_bits.smallest) // 2
    assert hints(refused(plan, int(between / 0.9)))["quantizer"] == ["quantizer=int4"]


def test_where_no_quantizer_is_enough_and_no_length_either_they_come_together(heavy: Path) -> None:
    base = (*LONG, "memory.kv_tokens=10000")
    in_4_bits = planned(plan_of(heavy, *base, "quantizer=int4")).estimate
    free = int((in_4_bits.smallest - in_4_bits.smallest_blocks // 2 * in_4_bits.pool.block_bytes[0]) / 0.9)
    lines = hint_lines(refused(plan_of(heavy, *base), free))
    assert [line[0] for line in lines] == ["quantizer=fp8", "quantizer=int8", "quantizer=int4"]
    memory = planned(plan_of(heavy, *base, *lines[-1]), free)
    assert 4000 < (memory.plan.settings.memory.kv_tokens or 0) < 5100


def test_weights_that_are_in_few_bits_already_get_no_hint_of_as_many(heavy: Path) -> None:
    for name in ("int8", "int4"):
        plan = plan_of(heavy, *LONG, f"quantizer={name}")
        text = refused(plan, int(planned(plan).estimate.smallest / 0.9 * 0.999))
        assert "quantizer=int8" not in text.partition("make it fit")[2] and "quantizer=fp8" not in text
        assert ("quantizer" in hints(text)) == (name == "int8")


def test_a_quantized_checkpoint_gets_no_hint_of_another_quantizer(heavy: Path) -> None:
    plan = plan_of(heavy, *LONG)
    free = int(planned(plan).estimate.smallest / 0.9 * 0.999)
    quantized = replace(plan, model=replace(plan.model, quantization={"quant_method": "any"}))
    with pytest.raises(DoesNotFit) as refusal:
        plan_memory(quantized, bind(plan), free=free)
    assert [line[0].partition("=")[0] for line in hint_lines(str(refusal.value))] == [
        "memory.fraction",
        "model.max_len",
    ]


class LongTexts(recurrent.TestQwenNext):
    __test__ = False
    variants: ClassVar = {"long": recurrent.DENSE | {"max_position_embeddings": 100_000}}


def test_where_layers_keep_states_fewer_rows_are_a_hint() -> None:
    base = ("scheduler.max_requests=256", "scheduler.token_budget=128")
    with LongTexts().checkpoint("long") as (model, _, _):
        folder = Path(model.path)
        fewer = planned(plan_of(folder, *base[1:], "scheduler.max_requests=128"))
        free = int(fewer.estimate.smallest / 0.9) + 4096
        found = hints(refused(plan_of(folder, *base), free))["scheduler.max_requests"]
        planned(plan_of(folder, *base, *found), free)  # raises if it does not fit
        assert int(found[0].partition("=")[2]) >= 128


def test_a_refusal_says_what_each_part_takes_and_what_is_missing(heavy: Path) -> None:
    plan = plan_of(heavy, *LONG)
    estimate = planned(plan).estimate
    free = estimate.smallest // 2
    text = refused(plan, free)
    missing = estimate.smallest - Budget(free, 0.9).usable
    pool = estimate.pool.num_bytes(estimate.smallest_blocks)
    for amount in (estimate.smallest, estimate.weights, free, missing, pool):
        assert size(amount) in text
    assert "memory.fraction=0.9" in text and "Nothing was loaded" in text


def test_nothing_is_loaded_when_it_does_not_fit(heavy: Path) -> None:
    phases: list[str] = []
    with pytest.raises(AssemblyError, match="does not fit"):
        build_engine(plan_of(heavy), lambda progress: phases.append(progress.phase), free=lambda device: 2**20)
    assert phases and "load weights" not in phases


def test_memory_that_is_gone_after_loading_stops_the_start_with_numbers(model: Path) -> None:
    memory = planned(plan_of(model))
    with pytest.raises(DoesNotFit, match=r"does not fit after loading: .* another process took memory meanwhile"):
        size_pool(memory, memory.estimate.weights, free_now=memory.budget.headroom)


def test_the_pool_takes_what_requests_can_use_and_no_more_than_fits(model: Path) -> None:
    plan = plan_of(model, "model.max_len=64", "scheduler.max_requests=4")
    memory = planned(plan)
    rich = size_pool(memory, memory.estimate.weights, free_now=64 * GIB)
    assert (rich.blocks, rich.max_len, rich.notes) == (4 * 4 + 1, 64, ())
    estimate = memory.estimate
    tight = planned(plan, free=int((estimate.smallest + 2 * estimate.pool.block_bytes[0]) / 0.9))
    pool = size_pool(tight, estimate.weights, free_now=tight.budget.free - estimate.weights)
    assert estimate.smallest_blocks <= pool.blocks <= estimate.smallest_blocks + 3
    assert estimate.total(pool.blocks) <= tight.budget.usable


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


def test_one_request_of_one_block_gets_the_smallest_pool(model: Path) -> None:
    engine = build_engine(plan_of(model, "model.max_len=16", "scheduler.max_requests=1"))
    try:
        assert engine.info.max_len == 16 and engine.info.num_blocks == (FEWEST_BLOCKS,)
    finally:
        engine.core.close()


IN_A_PROCESS_OF_ITS_OWN = """
import sys
import msgspec
from engine.assembly.plan import EnginePlan
from engine.loop.messages import EngineInfo
from engine.startup.build import build_engine
engine = build_engine(EnginePlan.from_json(sys.stdin.buffer.read()))
engine.core.close()
sys.stdout.buffer.write(msgspec.json.encode(engine.info))
"""
"""Memory that other tests freed would be used again, and nothing would seem to be taken."""


def test_the_ledger_holds_estimate_and_measurement_and_adds_up(heavy: Path) -> None:
    plan = plan_of(heavy, "model.max_len=64", "model.dtype=float32")
    command = [sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN]
    done = subprocess.run(command, input=plan.to_json(), stdout=subprocess.PIPE, check=True, timeout=120)
    info = msgspec.json.decode(done.stdout, type=EngineInfo)
    ledger = info.ledger
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
    shown = describe_start(info)
    assert info.lowering and all(line.split(": ", 1)[1] in shown for line in info.lowering), "which kernels run"
    assert ledger.peak_so_far_bytes >= info.phases[-1].held_bytes > info.weights_bytes / 2
    text = describe_ledger(ledger)
    assert all(line.name in text for line in ledger.lines if line.planned_bytes)


@few(2)
@needs_compiler
@pytest.mark.parametrize("drafter", ["none", "early_exit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_estimate_covers_programs_of_all_numbers_of_tokens(heavy: Path, drafter: str, dtype: str) -> None:
    """One line of the ledger, whose measurement at start-up is of few numbers of tokens."""
    plan = plan_of(heavy, *LONG[:2], f"model.dtype={dtype}", f"drafter={drafter}", "execution=compile")
    engine = build_engine(plan)
    try:
        assert engine.info.ledger is not None
        (line,) = (line for line in engine.info.ledger.lines if line.name == "programs")
        assert line.measured_bytes is not None and 0 < line.measured_bytes < line.planned_bytes
        for batch in range(1, 17):
            for i in range(batch):
                sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
                engine.core.submit(EngineRequest(f"{batch}-{i}", (1, 2, 3), sampling))
            while engine.core.has_work:
                engine.core.step()
        steps = engine.core._device._runner.model.small_steps
        assert steps is not None and line.measured_bytes <= steps.programs.num_bytes <= line.planned_bytes
    finally:
        engine.core.close()


@pytest.mark.parametrize("override", ["execution=eager", "kv_format=int8"])
def test_where_nothing_is_replayed_no_memory_is_set_aside_for_it(model: Path, override: str) -> None:
    assert planned(plan_of(model, override)).estimate.programs == 0 < planned(plan_of(model)).estimate.programs


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
