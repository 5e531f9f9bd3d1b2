"""What must be the same on two machines, and what is said where it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

from engine.assembly.assemble import assemble
from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan
from engine.contracts.model import DeviceFacts
from engine.startup.agreement import check_hello, check_present, hello, present
from engine.startup.fingerprint import versions

WHO = ("the engine at pid 4711 on 10.0.0.2", "this server")


@pytest.fixture(scope="module")
def plan() -> EnginePlan:
    return assemble(["device=cpu", "exporter=[]"])


def test_what_this_process_says_of_itself_agrees_with_itself(plan: EnginePlan) -> None:
    check_hello(WHO[0], hello(), versions(), plan, WHO[1])
    check_present(WHO[0], present(plan), plan, WHO[1])


def test_both_are_named_with_what_differs(plan: EnginePlan) -> None:
    there = changed(hello(), versions=changed(versions(), engine="0.0.1"))
    with pytest.raises(AssemblyError, match=f"^{WHO[0]} has engine 0.0.1, and {WHO[1]} has engine "):
        check_hello(WHO[0], there, versions(), plan, WHO[1])
    with pytest.raises(AssemblyError, match=f"^{WHO[0]} sees no CUDA device, and {WHO[1]} runs on one"):
        blind = changed(hello(), cuda_devices=0)
        check_hello(WHO[0], blind, versions(), replace(plan, device=DeviceFacts("cuda")), WHO[1])
    with pytest.raises(AssemblyError, match=f"finds checkpoint no files in model.path=/.*, and {WHO[1]} finds "):
        check_present(WHO[0], changed(present(plan), checkpoint_hash=""), plan, WHO[1])
