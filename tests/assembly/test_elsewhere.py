"""A plan from another machine meets the device of this one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.assembly import elsewhere
from engine.assembly.assemble import assemble
from engine.assembly.elsewhere import on_this_machine
from engine.assembly.errors import AssemblyError
from engine.assembly.threads import cores_of
from engine.contracts.model import DeviceFacts

MADE_ON = DeviceFacts("cpu", "another processor", memory_bytes=1, features=frozenset({"cxx", "sve"}))


def test_device_and_threads_are_of_the_machine_where_the_engine_runs() -> None:
    plan = assemble(["device=cpu", "exporter=[]"])
    found = on_this_machine(replace(plan, device=MADE_ON), 3)
    assert found.device == plan.device and cores_of(found) == 3
    assert found.slots == plan.slots


def test_what_cannot_run_on_it_is_refused_with_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(assemble(["device=cpu", "exporter=[]", "attention_kernel=cpu"]), execution="compile")
    poor = DeviceFacts("cpu", "a poor processor", no_cxx="none found")
    monkeypatch.setattr(elsewhere, "device_facts", lambda kind: poor)
    with pytest.raises(AssemblyError) as refused:
        on_this_machine(plan, 1)
    assert refused.value.problems == (
        "attention_kernel=cpu cannot serve bundled on a poor processor: it needs a C++ compiler: none found",
        "execution=compile: compiling needs a C++ compiler: none found",
    )
