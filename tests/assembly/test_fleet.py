"""Who starts the engines of a fleet, and what is refused."""

import pytest

from engine.assembly.compose import compose
from engine.assembly.describe import fleet
from engine.assembly.errors import AssemblyError
from engine.assembly.fleet import in_fleet
from engine.assembly.model_config import model_config
from engine.assembly.negotiation import resolve
from engine.assembly.plan import EnginePlan
from engine.assembly.threads import cores_of
from engine.contracts.config import ParallelismConfig
from engine.contracts.model import DeviceFacts
from engine.contracts.parallelism import ENGINES
from engine.contracts.provider import Provider
from engine.startup.replicas import devices_of, with_memory

TWO_GPUS = DeviceFacts("cuda", "test", (9, 0), count=2)


def not_here(model, device):
    return ("its library is not installed",)


@pytest.fixture
def plan(with_builtins, checkpoint, cpu, entry):
    """With two launchers of somebody else, of which one lacks something."""
    providers = [
        Provider("far", "engine_far:Far", config=FarConfig, provides=(ENGINES,)),
        Provider("farther", "engine_far:Farther", provides=(ENGINES,), unsupported=not_here),
    ]

    def make(*overrides, device=cpu):
        path = checkpoint()
        found = with_builtins(entry("engine-far", engine_parallelism=providers))
        composed = compose([f"model.path={path}", *overrides], found)
        return resolve(composed, found, model_config(path), device)

    return make


class FarConfig(ParallelismConfig):
    pass


def refused(make, *overrides, **kwargs):
    with pytest.raises(AssemblyError) as raised:
        make(*overrides, **kwargs)
    return raised.value.problems


def test_engines_are_children_of_the_server_unless_a_launcher_is_named(plan):
    assert plan("fleet.replicas=2").launcher is None
    made = plan("fleet.replicas=2", "fleet.launcher=far", "threads=3", "parallelism.tp=2")
    assert (made.launcher.name, made.launcher.factory) == ("far", "engine_far:Far")
    assert EnginePlan.from_json(made.to_json()) == made
    each = "2 ranks of 3 CPU threads of a machine that fleet.launcher=far finds"
    assert fleet(made) == f"fleet: 2 engines, each with {each}"


def test_engines_elsewhere_share_nothing_of_this_machine(plan):
    made = plan("fleet.replicas=2", "fleet.launcher=far", "parallelism.tp=4", device=TWO_GPUS)
    assert devices_of(made, 1, {}) == {} and with_memory(made) is made
    alone = plan()
    assert cores_of(plan("fleet.replicas=2", "fleet.launcher=far")) == cores_of(alone)
    assert with_memory(plan("fleet.replicas=2", "fleet.launcher=far")).memory_bytes is None


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (
            ["fleet.launcher=fra"],
            "fleet.launcher=fra: no plugin of that name does; those that start engines are local",
        ),
        (["fleet.launcher=threads"], "fleet.launcher=threads: no plugin of that name does"),
        (["fleet.launcher=farther"], "fleet.launcher=farther: its library is not installed"),
        (["fleet.launcher=far", "fleet.launch.tp=2"], "fleet.launch.tp: fleet.launcher=far has no such setting"),
        (["fleet.launch.address=x"], "fleet.launch.address: fleet.launcher=local has no settings; leave it out"),
        (
            ["fleet.launcher=far", "parallelism.pp=2", "parallelism.nodes=2", "communicator=gloo", "parallelism=join"],
            "fleet.launcher=far: an engine is on one machine, and parallelism.nodes=2; use parallelism.nodes=1",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(plan, overrides, why):
    assert any(problem.startswith(why) for problem in refused(plan, *overrides)), refused(plan, *overrides)


def test_what_a_launcher_says_of_its_settings_has_the_names_that_they_have_here():
    said = "parallelism=far: no room; parallelism.wait_s=3"
    assert in_fleet(said) == "fleet.launcher=far: no room; fleet.launch.wait_s=3"


def test_engines_for_prompts_are_the_last_ones_and_need_a_store_that_engines_share(plan):
    made = plan("fleet.replicas=3", "fleet.prefill=1", "kv_store=[host,peer]")
    settings = made.settings.fleet
    assert fleet(made).startswith("fleet: 3 engines (1 for prompts), each with ")
    assert [settings.role(number) for number in range(3)] == ["decode", "decode", "prefill"]
    assert [plan("fleet.replicas=2").settings.fleet.role(number) for number in range(2)] == ["both"] * 2
    for engines in ([], ["parallelism.tp=2"]):
        assert plan("fleet.replicas=2", "fleet.prefill=1", "kv_store=[host]", *engines)
    elsewhere = "fleet.launcher=far", "fleet.prefill=1", "fleet.replicas=2"
    (problem,) = refused(plan, *elsewhere, "kv_store=[host]")
    assert "fleet.prefill=1" in problem and "kv_store=[host] has none" in problem
    assert problem.endswith("add one that provides shared_records")
    (problem,) = refused(plan, "fleet.replicas=2", "fleet.prefill=2", "kv_store=[host,peer]")
    assert "fleet.prefill=2 of fleet.replicas=2" in problem and "use fleet.replicas=3 or more" in problem
    (problem,) = refused(plan, "fleet.autoscale.max=2", "fleet.prefill=1", "kv_store=[host,peer]")
    assert "fleet.autoscale.max=2" in problem
