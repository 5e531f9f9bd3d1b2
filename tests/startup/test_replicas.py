"""What each of several engines of one plan gets of a machine."""

from __future__ import annotations

from dataclasses import replace

from engine.assembly.plan import EnginePlan
from engine.assembly.threads import cores_of
from engine.contracts.config import FleetSettings, ParallelismConfig, SlotConfig
from engine.contracts.model import DeviceFacts
from engine.startup.replicas import VISIBLE, device_of, devices_of, engine_id, with_memory

from ..service.fakes import choice, make_plan


def fleet(replicas: int, gpus: int = 0, tp: int = 1) -> EnginePlan:
    plan = make_plan()
    device = DeviceFacts("cuda", count=gpus) if gpus else DeviceFacts("cpu", memory_bytes=2**31)
    settings = replace(plan.settings, fleet=FleetSettings(replicas))
    slots = {**plan.slots, "parallelism": (choice("parallelism", ParallelismConfig(tp=tp)),)}
    return replace(plan, settings=settings, device=device, slots=slots)


def test_each_engine_sees_the_gpus_of_its_own_ranks() -> None:
    plan = fleet(2, gpus=4, tp=2)
    assert [devices_of(plan, each, {}) for each in (0, 1)] == [{VISIBLE: "0,1"}, {VISIBLE: "2,3"}]
    assert devices_of(plan, 1, {VISIBLE: "4, 5,6,7"}) == {VISIBLE: "6,7"}
    assert device_of(plan, 1, devices_of(plan, 1, {})) == {VISIBLE: "3"}
    assert plan.ranks_per_device == 1


def test_one_engine_sees_what_its_process_sees() -> None:
    assert devices_of(fleet(1, gpus=4), 0, {}) == devices_of(fleet(2), 0, {}) == {}
    assert engine_id(fleet(1), 0) == "default" and engine_id(fleet(3), 2) == "replica-2"


def test_engines_that_share_a_gpu_share_its_memory() -> None:
    plan = fleet(2, gpus=1)
    assert devices_of(plan, 1, {}) == {VISIBLE: "0"} and plan.ranks_per_device == 2


def test_engines_on_a_cpu_share_its_cores_and_the_memory_that_was_free_before_the_first() -> None:
    alone, plan = fleet(1), with_memory(fleet(2))
    assert cores_of(plan) == max(1, cores_of(alone) // 2)
    assert with_memory(alone).memory_bytes is None and plan.memory_bytes
    assert plan.memory_bytes <= 2**30
    assert EnginePlan.from_json(plan.to_json()).memory_bytes == plan.memory_bytes


def test_records_that_outlive_an_engine_are_none_of_the_memory_it_finds_when_it_starts_again() -> None:
    alone = fleet(1)
    kept = replace(alone, slots={**alone.slots, "kv_store": (choice("kv_store", SlotConfig()),)})
    assert with_memory(kept).memory_bytes and with_memory(alone).memory_bytes is None
