import sys
from dataclasses import dataclass, replace
from types import ModuleType

import pytest

from engine.assembly import bind
from engine.assembly.compose import compose
from engine.assembly.describe import describe, fleet
from engine.assembly.errors import AssemblyError
from engine.assembly.model_config import model_config
from engine.assembly.negotiation import resolve
from engine.contracts.config import DrafterConfig, SchedulerConfig
from engine.contracts.model import DeviceFacts
from engine.contracts.provider import BuildContext, Provider
from engine.contracts.scheduler import Schedule
from engine.contracts.slots import SLOTS


@dataclass(frozen=True)
class MineConfig(DrafterConfig):
    k: int = 3


class Good:
    def __init__(self, config: SchedulerConfig, context: BuildContext) -> None:
        self.config, self.context = config, context

    def plan(self, view: object) -> Schedule:
        return Schedule(())


class Lacking:
    def __init__(self, config: SchedulerConfig, context: BuildContext) -> None:
        pass


def raising(config: object, context: object) -> None:
    raise ZeroDivisionError("division by zero")


@pytest.fixture
def plan(with_builtins, checkpoint, cpu, entry, monkeypatch):
    module = ModuleType("engine_mine_for_bind")
    module.Good, module.Lacking, module.raising = Good, Lacking, raising
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = {"good": "Good", "lacking": "Lacking", "raising": "raising", "absent": "Absent"}
    mine = entry(
        "engine-mine",
        engine_scheduler=[Provider(name, f"{module.__name__}:{attribute}") for name, attribute in names.items()]
        + [Provider("nowhere", "engine_mine_nowhere:X")],
    )
    found = with_builtins(mine)
    path = checkpoint()

    def make(*overrides):
        return resolve(compose([f"model.path={path}", *overrides], found), found, model_config(path), cpu)

    return make


def built(plan):
    return bind.build_slots(plan, ("scheduler",), bind.build_context(plan))["scheduler"][0]


def test_a_factory_gets_its_typed_config_and_the_context(plan):
    made = plan("scheduler=good", "scheduler.max_requests=5", "drafter=ngram", "kv_allocator.block_size=32")
    scheduler = built(made)
    assert scheduler.config == SchedulerConfig(max_requests=5)
    context = scheduler.context
    assert (context.max_requests, context.block_size, context.max_draft_tokens) == (5, 32, 4)
    assert (context.dtype, context.max_len, context.model) == ("bfloat16", 512, made.model)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raising", "failed to build: ZeroDivisionError: division by zero"),
        ("lacking", "not a Scheduler: it lacks plan"),
        ("absent", "cannot be imported from engine_mine_for_bind:Absent"),
        ("nowhere", "No module named 'engine_mine_nowhere'"),
    ],
)
def test_a_plugin_that_breaks_start_up_is_named_with_its_origin(name, words, plan):
    with pytest.raises(AssemblyError) as raised:
        built(plan(f"scheduler={name}"))
    (problem,) = raised.value.problems
    assert problem.startswith(f"scheduler={name} (from engine-mine 0.3.0)") and words in problem


def test_the_api_process_builds_router_and_exporters_in_order(plan, tmp_path):
    made = plan("router=response_cache", "exporter=[prometheus,jsonl]", f"exporter.jsonl.path={tmp_path}/events.jsonl")
    parts = bind.bind_api(made)
    assert [type(exporter).__name__ for exporter in parts.exporters] == ["PrometheusExporter", "JsonlExporter"]
    for exporter in parts.exporters:
        exporter.close()


def test_the_table_shows_every_slot_the_origin_and_the_notes(plan):
    text = describe(plan("scheduler=good", "drafter=ngram", "exporter=[]"), width=160)
    for slot in SLOTS:
        assert slot in text
    assert "engine-mine 0.3.0" in text and "torch (auto)" in text
    assert "attention_kernel=auto passed over triton: needs a CUDA device" in text
    assert "runs on the host" in text and "max_match=4" in text


def test_a_line_says_what_each_of_several_engines_has(plan):
    many = plan("fleet.replicas=2", "threads=1")
    assert "\nfleet: 2 engines, each with 1 CPU thread and 1/2 of the memory that is free at start\n" in describe(many)
    assert "fleet:" not in describe(plan())
    gpus = replace(many, device=DeviceFacts("cuda", "H100", (9, 0), count=4))
    assert fleet(gpus) == "fleet: 2 engines, each with 1 GPU of its own"
    assert fleet(replace(gpus, device=replace(gpus.device, count=1))).endswith("each with 1 GPU, which 2 ranks share")


def test_settings_that_look_like_markup_are_printed_as_they_are(plan):
    made = plan()
    text = describe(replace(made, notes=("[bold]x[/bold]",)), width=160)
    assert "[bold]x[/bold]" in text
