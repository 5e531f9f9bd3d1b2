"""Long prompts among short ones: what each scheduler does to waiting times, in virtual milliseconds."""

from __future__ import annotations

import random
from statistics import mean

import pytest
from hypothesis import HealthCheck, given, settings

from engine.contracts.config import SchedulerConfig
from engine.contracts.scheduler import Scheduler, SchedulerView, fit
from engine.testing.context import build_context
from engine.testing.scheduler import views
from engine.testing.simulation import Job, Machine, Simulation, Trace
from engine_plugins.scheduler.chunked_prefill import ChunkedPrefillConfig, ChunkedPrefillScheduler
from engine_plugins.scheduler.continuous import ContinuousScheduler
from engine_plugins.scheduler.static import StaticScheduler

ITL_TARGET_MS = 20.0
MACHINE = Machine(rows=16, blocks=2000, token_budget=2048, itl_target_ms=ITL_TARGET_MS)
CONTEXT = build_context(MACHINE.block_size)
SCHEDULERS: dict[str, Scheduler] = {
    "static": StaticScheduler(SchedulerConfig(), CONTEXT),
    "continuous": ContinuousScheduler(SchedulerConfig(), CONTEXT),
    "chunked_prefill": ChunkedPrefillScheduler(ChunkedPrefillConfig(), CONTEXT),
}
LONG = 6000


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@settings(max_examples=100, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(view=views())
def test_an_idle_engine_starts_with_the_most_important_request(scheduler: Scheduler, view: SchedulerView) -> None:
    """The contract leaves the order to the policy; these three promise that of the view."""
    if view.num_running or not view.waiting or not view.free_rows:
        return
    first = view.waiting[0]
    if fit(view.blocks_needed(first.request_id, first.remaining), view.free_blocks):
        assert scheduler.plan(view).rows[0].request_id == first.request_id


def mixed_jobs() -> list[Job]:
    """Sixty short chats over nine seconds and a long document every 1.5 seconds."""
    rng = random.Random(0)
    short = [Job(rng.uniform(0, 9000), rng.randint(10, 120), rng.randint(20, 60)) for _ in range(60)]
    return short + [Job(1500.0 * i, LONG, 20) for i in range(6)]


@pytest.fixture(scope="module")
def traces() -> dict[str, list[Trace]]:
    return {name: Simulation(s, MACHINE, mixed_jobs()).run() for name, s in SCHEDULERS.items()}


def short_ttfts(traces: list[Trace]) -> list[float]:
    return [t.ttft_ms for t in traces if t.job.prompt < LONG]


def worst_itl(traces: list[Trace]) -> float:
    return max(max(t.itl_ms, default=0.0) for t in traces)


def test_report_the_longest_waits(traces: dict[str, list[Trace]]) -> None:
    """Run with ``-s`` to see the figures."""
    for name, run in traces.items():
        short, long = short_ttfts(run), [t.ttft_ms for t in run if t.job.prompt == LONG]
        print(
            f"\n{name:16} short TTFT mean {mean(short):4.0f}, worst {max(short):4.0f}; "
            f"long TTFT worst {max(long):4.0f}; worst ITL {worst_itl(run):5.1f} (ms)",
            end="",
        )
        assert all(len(t.token_ms) == t.job.output for t in run)


def test_chunked_prefill_keeps_the_inter_token_latency_at_its_target(traces: dict[str, list[Trace]]) -> None:
    assert worst_itl(traces["chunked_prefill"]) <= ITL_TARGET_MS


def test_whole_prompts_stall_the_decodes_for_a_full_step(traces: dict[str, list[Trace]]) -> None:
    assert worst_itl(traces["continuous"]) > 5 * ITL_TARGET_MS


def test_short_prompts_wait_for_two_full_steps_at_most(traces: dict[str, list[Trace]]) -> None:
    """The step that runs when they arrive, and their own; not for the whole of a long prompt before them."""
    full_step_ms = MACHINE.base_ms + MACHINE.per_token_ms * MACHINE.token_budget
    assert max(short_ttfts(traces["chunked_prefill"])) <= 2 * full_step_ms
    assert max(short_ttfts(traces["continuous"])) > 2 * full_step_ms


def test_static_batches_make_newcomers_wait_longest(traces: dict[str, list[Trace]]) -> None:
    waits = {name: mean(short_ttfts(run)) for name, run in traces.items()}
    assert waits["static"] > 2 * waits["continuous"]
    assert waits["static"] > 2 * waits["chunked_prefill"]


def test_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    """Short prompts arrive as fast as the engine can take them, the long one among them."""
    jobs = [Job(5.0 * i, 100, 2) for i in range(800)] + [Job(100.0, LONG, 2)]
    run = Simulation(SCHEDULERS["chunked_prefill"], MACHINE, jobs).run()
    [long] = [t for t in run if t.job.prompt == LONG]
    per_step = (ITL_TARGET_MS - MACHINE.base_ms) / MACHINE.per_token_ms / 2 - 2 * MACHINE.rows
    assert long.ttft_ms <= LONG / per_step * ITL_TARGET_MS
    assert long.ttft_ms < jobs[799].arrives_ms, "it was served while short ones kept coming"


def test_preempted_requests_end_in_order_of_importance() -> None:
    """Eight answers that do not fit the cache together: the earlier ones are never thrown out."""
    machine = Machine(rows=8, blocks=20, token_budget=256)
    for name in ("continuous", "chunked_prefill"):
        run = Simulation(SCHEDULERS[name], machine, [Job(0.0, 20, 200) for _ in range(8)]).run()
        assert run[0].preemptions == 0
        assert sum(t.preemptions for t in run) > 0
        assert run[0].token_ms[-1] == min(t.token_ms[-1] for t in run)
