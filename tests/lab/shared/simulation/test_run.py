"""Requests through simulated engines."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from tests.laws.harness import _plan
from tests.selection import few

from engine.contracts.config import SlotConfig
from engine.contracts.router import Answer, ApiRequest, EngineView, Route, ToUrl
from engine.contracts.step_cost import DraftCost, StepCost
from engine.service.load import Load
from engine.testing.context import build_context
from engine_lab.shared.simulation.outcome import Outcome, SimulatedRequest
from engine_lab.shared.simulation.run import Simulation, router_of, simulate
from engine_lab.shared.simulation.spec import Drafts, EngineSpec, Overheads
from engine_lab.shared.simulation.trace import TraceRequest
from engine_plugins.router.direct import DirectRouter

STEP_MS = 10.0
COST = StepCost(STEP_MS, 0.0, 100)
OVERHEADS = Overheads(receive_ms=2.0, tokenize_us=10.0, deliver_ms=1.0)


def spec(*overrides: str, blocks: int = 200, cost: StepCost = COST, **fields: object) -> EngineSpec:
    return EngineSpec(_plan(overrides), blocks, cost, **fields)  # type: ignore[arg-type]


def one_by_one(count: int, prompt: int = 20, output: int = 5) -> list[TraceRequest]:
    return [TraceRequest(float(i), prompt, output) for i in range(count)]


def mixed(seed: int, count: int = 60, rate: float = 12.0) -> list[TraceRequest]:
    rng, now, trace = random.Random(seed), 0.0, []
    for i in range(count):
        now += rng.expovariate(rate)
        prompt = rng.randint(4, 120)
        hashes = (rng.randint(0, 2), 10 + rng.randint(0, 3), 1000 + i)
        trace.append(TraceRequest(now, prompt, rng.randint(1, 100), hashes, 16, request_id=str(i)))
    for turn in range(5, count, 9):
        trace[turn] = replace(trace[turn], arrival_s=0.05, after=(str(turn - 3),))
    return trace


@few(3)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("overlap", ["true", "false"])
@pytest.mark.parametrize(
    ("scheduler", "allocator", "blocks"),
    [
        ("chunked_prefill", "prefix_cache", 200),
        ("chunked_prefill", "prefix_cache", 34),  # requests are preempted, cached blocks are evicted
        ("continuous", "paged", 60),
        ("static", "contiguous", 120),
    ],
)
def test_leaps_change_nothing_but_the_time_it_takes(
    scheduler: str, allocator: str, blocks: int, overlap: str, seed: int
) -> None:
    engine = spec(
        f"scheduler={scheduler}", f"kv_allocator={allocator}", f"overlap={overlap}",
        blocks=blocks, cost=StepCost(STEP_MS, 0.3, 100, per_decode_context_ms=1e-3, gap_ms=0.2), overheads=OVERHEADS,
    )  # fmt: skip
    trace = mixed(seed)
    assert simulate(trace, [engine] * 2, leap=True) == simulate(trace, [engine] * 2, leap=False)


def test_some_of_these_requests_are_preempted() -> None:
    assert sum(steps.preemptions for steps in simulate(mixed(1), [spec(blocks=34)] * 2).steps) > 0


def test_most_steps_of_long_answers_are_leapt_over() -> None:
    calls, engine = [], spec()
    scheduler = "engine_plugins.scheduler.chunked_prefill"
    plan = sys.modules[scheduler].ChunkedPrefillScheduler.plan

    def counted(self: object, view: object) -> object:
        calls.append(view)
        return plan(self, view)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{scheduler}.ChunkedPrefillScheduler.plan", counted)
        outcome = simulate([TraceRequest(0.0, 4, 200)], [engine])
    assert outcome.steps[0].num_steps == 200 and len(calls) < 20


def test_nobody_asks_the_host_for_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = spec(drafts=Drafts("host"))

    def forbidden() -> float:
        raise AssertionError("the host's clock was read")

    for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time"):
        monkeypatch.setattr(time, name, forbidden)
    simulate(mixed(0, count=10), [engine])
    monkeypatch.undo()


def test_the_simulator_needs_no_torch() -> None:
    modules = "engine_lab.shared.simulation.run, engine_lab.shared.simulation.plans"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_same_seed_accepts_the_same_drafts() -> None:
    engine = spec("drafter.max_width=3", drafts=Drafts("device", DraftCost(acceptance=(0.5,))))
    first, again, other = (simulate(mixed(1, 20), [engine], seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert [r.accepted for r in first.requests] != [r.accepted for r in other.requests]


@pytest.mark.parametrize("placement", ["host", "device"])
def test_drafts_that_are_all_accepted_save_steps(placement: str) -> None:
    engine = spec(
        "drafter.adaptive=false", "drafter.max_width=3", drafts=Drafts(placement, DraftCost(acceptance=(1.0,)))
    )  # type: ignore[arg-type]
    outcome = simulate([TraceRequest(0.0, 10, 41)], [engine])
    assert outcome.requests[0].output_tokens == 41
    assert 11 <= outcome.steps[0].num_steps <= 14  # 4 tokens a step


def test_parts_add_up_to_the_time_to_the_first_token() -> None:
    for request in simulate(mixed(2), [spec(overheads=OVERHEADS)]).requests:
        parts = request.api_ms, request.dispatch_ms, request.queue_ms, request.prefill_ms, request.deliver_ms
        assert sum(parts) == pytest.approx(request.ttft_ms)
        assert request.ttft_ms + request.decode_ms == pytest.approx(request.e2e_ms)


def test_one_request_alone_takes_its_steps_and_what_is_around_them() -> None:
    (request,) = simulate([TraceRequest(0.0, 100, 4)], [spec("overlap=false", overheads=OVERHEADS)]).requests
    assert request.api_ms == pytest.approx(2.0 + 1.0)
    assert request.ttft_ms == pytest.approx(3.0 + STEP_MS + 1.0)
    assert request.itl_ms == pytest.approx(STEP_MS)


def test_a_request_is_read_between_two_steps() -> None:
    trace = [TraceRequest(0.0, 10, 50), TraceRequest(0.102, 10, 5)]
    _, second = simulate(trace, [spec("overlap=false")]).requests
    assert second.dispatch_ms == pytest.approx(0.0) and second.queue_ms == pytest.approx(8.0)


def test_what_prompts_share_is_found_in_the_cache() -> None:
    trace = [TraceRequest(float(i), 60, 3, (7, 8, 100 + i), 16) for i in range(3)]
    assert [r.cached_tokens for r in simulate(trace, [spec()]).requests] == [0, 32, 32]


def test_an_answer_is_found_in_the_cache_by_the_next_prompt() -> None:
    trace = [
        TraceRequest(0.0, 24, 24, (1, 2, 3), 16, request_id="a"),
        TraceRequest(1.0, 60, 3, (1, 2, 3, 4), 16, after=("a",)),
    ]
    first, second = simulate(trace, [spec()]).requests
    assert second.cached_tokens >= 47  # all that was computed: the last token of an answer never is
    assert second.arrival_s == pytest.approx(first.e2e_ms / 1e3 + 1.0)


def engines_of(outcome: Outcome) -> list[int]:
    return [request.engine for request in outcome.requests]


def test_requests_go_where_the_router_of_the_plan_sends_them() -> None:
    assert engines_of(simulate(one_by_one(4), [spec("router=round_robin")] * 2)) == [0, 1, 0, 1]
    assert engines_of(simulate(one_by_one(4), [spec("router=direct")] * 2)) == [0, 0, 0, 0]
    shared = [TraceRequest(float(i), 60, 3, (7, 8, 100 + i), 16) for i in range(4)]
    at_home = simulate(shared, [spec("router=prefix")] * 2)
    assert len(set(engines_of(at_home))) == 1 and [r.cached_tokens for r in at_home.requests] == [0, 32, 32, 32]


class Watching(DirectRouter):
    """Keeps what it sees, and is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[EngineView, ...]] = []
        self.told: list[tuple[str, str]] = []
        self.answered: list[str] = []

    def place(self, request: ApiRequest, fleet: tuple[EngineView, ...]) -> Route:
        self.seen.append(fleet)
        return super().place(request, fleet)

    def begun(self, request: ApiRequest, engine_id: str) -> None:
        self.told.append((request.request_id, engine_id))

    def finished(self, request: ApiRequest, answer: Answer) -> None:
        self.answered.append(request.request_id)


@pytest.mark.parametrize("leap", [True, False])
def test_a_router_sees_the_counts_of_the_api_process(leap: bool) -> None:
    """Steps of 10 ms: the first request, of 20 tokens, has 3 of its tokens after 35 ms, and the second one none."""
    router, engine = Watching(), spec("overlap=false", "scheduler.max_requests=1")
    trace = [TraceRequest(0.0, 20, 30), TraceRequest(0.012, 40, 5), TraceRequest(0.035, 9, 5), TraceRequest(9.0, 9, 5)]
    simulate(trace, [engine, engine], router=router, leap=leap)
    seen = [
        (view.sequences, view.queued_tokens, view.running_tokens, view.running, view.waiting) for view, _ in router.seen
    ]
    assert seen == [(0, 0, 0, 0, 0), (1, 0, 21, 1, 0), (2, 40, 23, 1, 1), (0, 0, 0, 0, 0)]
    assert all(other.sequences == 0 for _, other in router.seen)
    assert router.told == [(name, "0") for name in "0123"] and router.answered == list("0123")


def test_a_router_that_answers_by_itself_is_not_simulated() -> None:
    class Answers(DirectRouter):
        def place(self, request: ApiRequest, fleet: tuple[EngineView, ...]) -> Route:
            return ToUrl("http://127.0.0.1:1")

    with pytest.raises(ValueError, match="the router returned ToUrl: only engines are simulated"):
        simulate(one_by_one(1), [spec()], router=Answers(SlotConfig(), build_context()))


@pytest.mark.parametrize("leap", [True, False])
def test_what_a_dying_engine_has_not_begun_is_served_by_another_one(leap: bool) -> None:
    engine = spec("router=round_robin", "overlap=false", "scheduler.max_requests=1", blocks=50)
    trace = [TraceRequest(0.001 * i, 20, 30) for i in range(6)]
    outcome = simulate(trace, [engine] * 2, deaths={0: 0.1}, leap=leap)
    begun, *others = outcome.requests
    assert begun.error == "the engine died" and begun.output_tokens == 0
    assert [(r.engine, r.output_tokens, r.error) for r in others] == [(1, 30, "")] * 5
    assert outcome == simulate(trace, [engine] * 2, deaths={0: 0.1}, leap=not leap)


def test_without_an_engine_requests_are_refused() -> None:
    engine = spec("router=round_robin")
    outcome = simulate(one_by_one(3), [engine], deaths={0: 0.5})
    assert [bool(r.error) for r in outcome.requests] == [False, True, True]
    assert outcome.requests[2].engine == -1 and "no engine is running" in outcome.requests[2].error


@few(3)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("router", ["round_robin", "least_load", "prefix"])
def test_counts_are_zero_at_the_end_and_leaps_change_no_decision(router: str, seed: int) -> None:
    engine, deaths = spec(f"router={router}", blocks=60, overheads=OVERHEADS), {1: 2.0}
    sims = [Simulation(mixed(seed), [engine] * 3, router_of(engine.plan), deaths, 0, leap) for leap in (True, False)]
    with_leaps, without = [each.run() for each in sims]
    assert with_leaps == without
    assert all(load == Load() for each in sims for load in each._loads)


def test_a_prompt_that_does_not_fit_is_refused_and_the_others_are_served() -> None:
    trace = [TraceRequest(0.0, 5000, 5), TraceRequest(0.0, 10, 5)]
    refused, served = simulate(trace, [spec()]).requests
    assert "5000 tokens" in refused.error and refused == SimulatedRequest(0.0, 0, 5000, 0, error=refused.error)
    assert served.output_tokens == 5


def test_requests_that_wait_for_what_is_not_there_are_an_error() -> None:
    with pytest.raises(ValueError, match="waits for 'x', which is not in it"):
        simulate([TraceRequest(0.0, 10, 5, after=("x",))], [spec()])
    circle = [TraceRequest(0.0, 9, 5, request_id=a, after=(b,)) for a, b in (("a", "b"), ("b", "a"))]
    with pytest.raises(ValueError, match="2 requests of the trace wait for each other"):
        simulate(circle, [spec()])
