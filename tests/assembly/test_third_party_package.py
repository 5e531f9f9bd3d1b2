"""A package of one Python file and one entry point, installed beside the engine, which does not change."""

import importlib
import re
import shutil
import sys
from pathlib import Path

import pytest

from engine.assembly.assemble import assemble, configure
from engine.assembly.bind import build_context, build_slots
from engine.assembly.errors import AssemblyError
from engine.contracts.scheduler import RequestView, SchedulerView
from engine.contracts.step_cost import StepCost

EXAMPLE = Path(__file__).resolve().parents[2] / "contrib" / "engine-example"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a module and its metadata on the path, as an installer would."""

    def put(dist: str, module: str, source: Path | str) -> None:
        site = tmp_path / dist
        info = site / f"{dist.replace('-', '_')}-0.1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[engine.plugins.v1]\nexample = {module}\n")
        if isinstance(source, Path):
            shutil.copy(source, site / f"{module}.py")
        else:
            (site / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, module, raising=False)
        importlib.invalidate_caches()

    yield put
    sys.modules.pop("engine_example", None)


@pytest.fixture
def example(install):
    install("engine-example", "engine_example", EXAMPLE / "engine_example.py")


@pytest.fixture
def model(checkpoint):
    return f"model.path={checkpoint()}"


def test_it_is_listed_with_its_origin(example):
    found = configure().discovered
    listed = {(o.slot, o.name) for o in found.offers if str(o.origin) == "engine-example 0.1.0"}
    assert listed == {("scheduler", "shortest_first"), ("drafter", "repeat_last")}


def test_it_is_selected_by_override_and_built(example, model):
    plan = assemble([model, "+preset=latency", "scheduler=shortest_first", "drafter=repeat_last", "drafter.min_run=3"])
    assert plan.choice("drafter").config["min_run"] == 3
    parts = build_slots(plan, ("scheduler", "drafter"), build_context(plan))
    assert [type(part).__name__ for (part,) in parts.values()] == ["ShortestFirst", "RepeatLast"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("drafter.min_run=often", "expected int"),
        ("drafter.min_rum=3", "did you mean 'min_run'"),
        ("drafter.min_run=0", "at least 1"),
    ],
)
def test_its_settings_are_type_checked(override, words, example):
    with pytest.raises(AssemblyError, match=words):
        configure(["drafter=repeat_last", override])


RAISES_AT_BUILD = """
from engine.contracts.provider import Provider
from engine.hookspecs import hookimpl

@hookimpl
def engine_scheduler():
    return [Provider("angry", "engine_angry:Angry")]

class Angry:
    def __init__(self, config, context):
        raise RuntimeError("not today")
"""


def test_it_breaks_start_up_with_its_own_name_when_it_raises(install, model):
    install("engine-angry", "engine_angry", RAISES_AT_BUILD)
    plan = assemble([model, "scheduler=angry"])
    with pytest.raises(AssemblyError, match=r"scheduler=angry \(from engine-angry 0.1.0\).*RuntimeError: not today"):
        build_slots(plan, ("scheduler",), build_context(plan))


def test_unselected_it_may_be_broken_without_harm_and_is_reported(install, model):
    install("engine-broken", "engine_broken", "raise RuntimeError('at import')")
    (failure,) = configure().discovered.failures
    assert "engine-broken 0.1.0" in str(failure) and "at import" in str(failure)
    assert assemble([model]).choice("scheduler").name == "chunked_prefill"


def test_it_can_be_switched_off(example):
    found = configure(["plugins.disable=[engine-example]"]).discovered
    assert found.named("drafter", "repeat_last") == ()
    assert [origin.dist for origin in found.switched_off] == ["engine-example"]


def test_what_is_switched_off_is_named_when_it_is_asked_for(example):
    with pytest.raises(AssemblyError, match=r"no such drafter option.*\n.*engine-example .* is switched off"):
        configure(["drafter=repeat_last", "plugins.third_party=false"])


def test_the_readmes_plugin_works_as_printed(install, model):
    readme = (EXAMPLE.parents[1] / "README.md").read_text()
    (source,) = [
        block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "# engine_mine.py" in block
    ]
    install("engine-mine", "engine_mine", source)
    plan = assemble([model, "scheduler=one_at_a_time"])
    ((scheduler,),) = build_slots(plan, ("scheduler",), build_context(plan)).values()
    requests = tuple(RequestView(name, 9, 0, False, 0, 0, 20, 0) for name in "ab")
    view = SchedulerView(
        (), requests, 0, 4, (100,), 2048, 0.0, StepCost(0, 0, 0), lambda name, n: (0,), lambda name: (0,)
    )
    assert [(row.request_id, row.num_tokens) for row in scheduler.plan(view).rows] == [("a", 9)]
