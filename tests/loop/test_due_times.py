"""Targets for the first token decide who is served first, and nobody waits for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.contracts.config import SchedulerConfig
from engine.contracts.request import EngineRequest
from engine.contracts.scheduler import Scheduler
from engine.loop.due_times import assign, own_due_s
from engine.loop.queues import Queues
from engine.loop.sequence import Sequence
from engine.testing.context import build_context
from engine.testing.simulation import Job, Machine, Simulation
from engine_plugins.scheduler.chunked_prefill import ChunkedPrefillConfig, ChunkedPrefillScheduler
from engine_plugins.scheduler.continuous import ContinuousScheduler

LATE_S = 10.0


def waits(name: str, came_s: float, ttft_ms: float, client: str = "", priority: int = 0) -> Sequence:
    request = EngineRequest(name, (1,), priority=priority, client=client, ttft_ms=ttft_ms)
    return Sequence(request, int(1e3 * came_s), 0, frozenset(), 9, came_s, [1])


def order(now_s: float, *sequences: Sequence, lead_ms: float = 0.0) -> list[str]:
    queues = Queues(8)
    for each in sequences:
        queues.add(each)
    queues.sort_by_due(now_s, LATE_S, lambda num_tokens: lead_ms)
    return [each.request_id for each in queues.waiting]


def test_who_is_due_first_is_first() -> None:
    batch, chat, code = waits("batch", 100.0, 30_000), waits("chat", 128.0, 500), waits("code", 128.1, 100)
    assert order(128.15, batch, chat, code) == ["code", "chat", "batch"]
    assert order(129.9, batch, waits("new chat", 129.8, 500)) == ["batch", "new chat"], "its age wins"


def test_a_smaller_priority_comes_before_any_due_time() -> None:
    assert order(1.0, waits("code", 1.0, 100), waits("urgent", 1.0, 30_000, priority=-1)) == ["urgent", "code"]


def test_who_is_late_makes_way_for_those_who_can_be_in_time_for_a_stated_time() -> None:
    late, new = waits("late", 1.0, 500), waits("new", 2.0, 500)
    assert order(2.0, late, new) == ["new", "late"]
    assert order(11.9, late, waits("new", 11.9, 500)) == ["late", "new"]


def test_late_is_who_cannot_be_in_time_any_more() -> None:
    assert order(1.4, waits("a", 1.0, 500), waits("b", 1.3, 500), lead_ms=90.0) == ["a", "b"]
    assert order(1.4, waits("a", 1.0, 500), waits("b", 1.3, 500), lead_ms=110.0) == ["b", "a"]


def test_clients_share_the_due_times_of_their_class() -> None:
    many = [waits(f"many{i}", 1.0 + 0.01 * i, 500, "many") for i in range(3)]
    few = waits("few", 1.1, 500, "few")
    assert order(1.1, *many, few, waits("code", 1.1, 100)) == ["code", "many0", "few", "many1", "many2"]


def test_who_lost_its_blocks_after_its_first_token_is_not_late() -> None:
    queues, preempted = Queues(8), waits("preempted", 1.0, 500)
    queues.add(preempted)
    queues.start(preempted)
    preempted.tokens.append(2)
    queues.suspend(preempted)
    queues.add(waits("new", 5.0, 500))
    queues.sort_by_due(5.0, LATE_S, lambda num_tokens: 0.0)
    assert [each.request_id for each in queues.waiting] == ["preempted", "new"]


@given(
    st.lists(st.tuples(st.sampled_from((100.0, 500.0, 30_000.0)), st.floats(1, 40), st.sampled_from("abc"))),
    st.floats(1, 60),
)
def test_due_times_of_a_class_change_hands_but_stay(found: list[tuple[float, float, str]], now_s: float) -> None:
    """Each of those that are in time, and each of the late ones, is given once."""
    sequences = [waits(str(i), came_s, ttft_ms, client) for i, (ttft_ms, came_s, client) in enumerate(found)]
    assign(sequences, now_s, LATE_S, lambda num_tokens: 0.0)
    for is_late in (False, True):
        own = sorted(own_due_s(each) for each in sequences if (own_due_s(each) < now_s) is is_late)
        given_s = sorted(each.due_s for each in sequences if (own_due_s(each) < now_s) is is_late)
        assert given_s == [due_s + LATE_S * is_late for due_s in own]


def test_age_wins_beside_more_urgent_work_than_the_engine_can_do() -> None:
    """Twice the chats that there is time for. Those that came up to 0.5 s are due before the batch request, late or
    not, and it waits for these alone; behind a better priority it waits for all."""
    machine = Machine(rows=4, blocks=400, token_budget=128, base_ms=5.0, per_token_ms=0.1, late_s=0.5)

    def wait_ms(scheduler: Scheduler, chat_ms: float, batch: Job) -> float:
        chats = [Job(8.0 * i, 64, 8, ttft_ms=chat_ms) for i in range(200)]
        traces = Simulation(scheduler, machine, [*chats, batch]).run()
        return next(trace.ttft_ms for trace in traces if trace.job.prompt == 256)

    for scheduler in (
        ChunkedPrefillScheduler(ChunkedPrefillConfig(), build_context(machine.block_size)),
        ContinuousScheduler(SchedulerConfig(), build_context(machine.block_size)),
    ):
        aged = wait_ms(scheduler, 200.0, Job(200.0, 256, 8, ttft_ms=500.0))
        starved = wait_ms(scheduler, 0.0, Job(200.0, 256, 8, priority=1))
        assert 500.0 < aged < 1_500.0 < 2_000.0 < starved


def test_the_least_itl_target_of_those_that_decode_bounds_a_step() -> None:
    def longest(*itl_ms: float) -> float:
        machine = Machine(rows=8, blocks=2000, token_budget=2048, itl_target_ms=40.0)
        scheduler = ChunkedPrefillScheduler(ChunkedPrefillConfig(), build_context(machine.block_size))
        decoding = [Job(0.0, 20, 100, ttft_ms=500.0, itl_ms=each) for each in itl_ms]
        jobs = [*decoding, *[Job(50.0, 1500, 2, ttft_ms=500.0, itl_ms=1e3)] * 3]
        traces = Simulation(scheduler, machine, jobs).run()
        return max(ms for trace in traces if trace.job.output == 100 for ms in trace.itl_ms)

    assert longest(20.0) <= 20.0 < longest(0.0) <= 40.0 < longest(80.0) <= 80.0
    assert longest(20.0, 80.0) <= 20.0


def test_no_step_takes_a_large_part_of_a_target() -> None:
    """Long prompts that share a step would all be late together."""
    machine = Machine(rows=8, blocks=4000, token_budget=4096, base_ms=5.0, per_token_ms=0.3)
    scheduler = ChunkedPrefillScheduler(ChunkedPrefillConfig(), build_context(machine.block_size))

    def longest(ttft_ms: float) -> int:
        simulation = Simulation(scheduler, machine, [Job(float(i), 600, 8, ttft_ms=ttft_ms) for i in range(16)])
        simulation.run()
        return max(simulation.step_tokens)

    assert longest(0.0) >= 2 * 600 and longest(60_000.0) >= 2 * 600
    assert machine.ms(longest(1_000.0)) <= 250.0
    assert longest(10.0) <= 64 + machine.rows
