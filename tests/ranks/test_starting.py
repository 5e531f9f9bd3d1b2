"""Ranks that do not go together are refused before anything is loaded, with both values and what to do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from engine.assembly.assemble import assemble
from engine.assembly.errors import AssemblyError
from engine.contracts.communicator import CommunicatorError
from engine.contracts.request import EngineRequest, SamplingParams
from engine.loop.client import EngineDead
from engine.ranks.messages import Versions
from engine.startup import rank, worker
from engine.startup.build import Engine, build_engine
from engine.startup.fingerprint import plugin_digests, versions
from engine.startup.inprocess import InprocessEngineClient
from engine.startup.memory.budget import DoesNotFit
from engine.startup.rank import Rank
from engine.step.plan import RankFailed, StepPlan
from engine.step.runner import ModelRunner
from engine_plugins.communicator.simulated import SimulatedCommunicator

COMMON = ("model.path=bundled", "device=cpu", "threads=1", "exporter=[]", "model.max_len=256", "parallelism=threads")
OURS = versions()


def started(*overrides: str) -> Engine:
    return build_engine(assemble([*COMMON, "communicator=simulated", *(overrides or ("parallelism.tp=2",))]))


def nothing_is_loaded(rank: Rank) -> int:
    raise AssertionError("weights are read")


def refused(patch: pytest.MonkeyPatch, *overrides: str) -> str:
    patch.setattr(Rank, "load", nothing_is_loaded)
    with pytest.raises(AssemblyError) as raised:
        started(*overrides)
    return str(raised.value)


def says(patch: pytest.MonkeyPatch, message: str, **changes: Any) -> None:
    """Have workers say something else."""
    said = getattr(worker, message)
    patch.setattr(worker, message, lambda *given: msgspec.structs.replace(said(*given), **changes))


@pytest.mark.parametrize("what", ["engine", "python", "torch"])
def test_versions_that_differ_are_named(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, "hello", versions=Versions(**{**_fields(OURS), what: "0.0.1"}))
    said = refused(monkeypatch)
    ours = _fields(OURS)[what]
    assert f"rank 1 (thread worker 1) has {what} 0.0.1, and rank 0 has {what} {ours}: install the same" in said


def _fields(versions: Versions) -> dict[str, str]:
    return {name: getattr(versions, name) for name in ("engine", "python", "torch")}


def test_one_changed_op_in_the_core_of_a_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = msgspec.structs.replace(OURS, source={**OURS.source, "engine.kernels": "0123abcd"})
    says(monkeypatch, "hello", versions=changed)
    own = OURS.source["engine.kernels"]
    assert refused(monkeypatch) == (
        "rank 1 (thread worker 1) has other source than rank 0: engine.kernels (0123abcd, rank 0: "
        f"{own}); install the same on all"
    )


def test_another_source_of_a_plugin_of_the_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = assemble([*COMMON, "communicator=simulated"])
    says(monkeypatch, "present", plugins={**plugin_digests(plan), "engine_mine": "0123abcd"})
    assert "other source than rank 0: engine_mine (0123abcd, rank 0: none); install" in refused(monkeypatch)


def test_plans_that_are_read_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, "present", plan_hash="0123")
    assert "rank 1 (thread worker 1) reads plan 0123, and rank 0 has plan " in refused(monkeypatch)


@pytest.mark.parametrize(("found", "words"), [("abcd", "finds checkpoint abcd"), ("", "finds checkpoint no files")])
def test_other_files_on_another_machine_are_refused(found: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, "present", checkpoint_hash=found)
    said = refused(monkeypatch)
    assert words in said and "put the same files there on all machines" in said


def test_a_cut_that_cannot_be_is_refused_with_those_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused(monkeypatch, "parallelism.pp=7")
    assert "parallelism.pp=7: the model falls into at most 6 stages" in said


def test_a_rank_without_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_memory = Rank.plan_memory

    def tight(rank: Rank) -> None:
        if rank.rank == 1:
            raise DoesNotFit("bundled does not fit on this cpu device")
        plan_memory(rank)

    monkeypatch.setattr(Rank, "plan_memory", tight)
    assert "rank 1: bundled does not fit on this cpu device" in refused(monkeypatch)


def test_the_pair_that_does_not_reach_each_other_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    recv: Callable[..., Any] = SimulatedCommunicator.recv

    def deaf(communicator: SimulatedCommunicator, x: Any, source: int) -> Any:
        if source == 1 and communicator._here.rank == 2:
            raise CommunicatorError("no route to host")
        return recv(communicator, x, source)

    monkeypatch.setattr(SimulatedCommunicator, "recv", deaf)
    monkeypatch.setattr(Rank, "load", nothing_is_loaded)
    with pytest.raises(RankFailed, match=r"ranks 1 and 2 do not reach each other: .*no route to host"):
        started("parallelism.tp=3")


def test_all_ranks_have_as_many_blocks_as_the_one_with_the_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Rank.load

    def with_less(rank: Rank) -> int:
        load(rank)
        if rank.rank == 1:
            rank.own_pool = replace(rank.own_pool, blocks=rank.own_pool.blocks - 100)
        return rank.own_pool.blocks

    monkeypatch.setattr(Rank, "load", with_less)
    engine = started()
    ranks = engine.info.ranks
    assert engine.info.num_blocks == (ranks[0].num_blocks - 100,)
    assert any("rank 1 has memory for" in note and "the fewest" in note for note in engine.info.notes)
    engine.core.close()


def test_a_rank_whose_step_fails_is_named_first_and_its_traceback_logged_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    launch = ModelRunner.launch

    def failing(runner: ModelRunner, plan: StepPlan) -> Any:
        if threading.current_thread().name == "worker 1" and plan.plan_id > 3:
            raise OSError("the device has fallen off the bus")
        return launch(runner, plan)

    async def scenario() -> EngineDead:
        client = InprocessEngineClient(assemble([*COMMON, "communicator=simulated", "parallelism.tp=3"]))
        await client.start()
        monkeypatch.setattr(ModelRunner, "launch", failing)
        stream = client.submit(EngineRequest("a", (5, 6, 7), SamplingParams(max_tokens=50, ignore_eos=True)))
        with pytest.raises(EngineDead) as raised:
            async for _ in stream:
                pass
        await client.close()
        return raised.value

    error = asyncio.run(scenario())
    assert error.cause == "rank_failed"
    assert str(error).startswith("rank 1 (thread worker 1) failed in plan "), error
    first, *others = str(error).removesuffix(" (while running)").split("; rank ")
    assert first.endswith(": OSError: the device has fallen off the bus") and len(others) >= 2
    logged = capfd.readouterr().err
    assert logged.count("Traceback") == 1 and "OSError: the device has fallen off the bus" in logged


def test_a_rank_that_fails_while_it_loads_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    load = rank.load_plan

    def failing(*args: Any) -> Any:
        if not args[3].is_last:
            return load(*args)
        raise OSError("the disk is gone")

    monkeypatch.setattr(rank, "load_plan", failing)
    with pytest.raises(RankFailed, match=r"^rank 1 \(thread worker 1\) failed .*load weights.*: OSError: the disk is"):
        started("parallelism.pp=2")
    assert capfd.readouterr().err.count("Traceback") == 1
