"""What the planner makes of a scheduler's rows: room, drafts, preemption, and what it refuses."""

import pytest

from engine.contracts.events import PrefixCacheEvent
from engine.contracts.request import EngineRequest, SamplingParams
from engine.contracts.scheduler import Schedule, ScheduledRow, Scheduler
from engine.plugin_guard.calls import PluginError, named
from tests.laws.harness import expected

from .simulated import simulate


def request(name="r", prompt=tuple(range(20)), max_tokens=10):
    return EngineRequest(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0))


def scheduled_by(simulation, plan):
    """Replace the scheduler of a running loop."""

    class Mine:
        def plan(self, view):
            return plan(view)

    simulation.core._planner._scheduler = named(Mine(), "scheduler=mine (from engine-mine 0.3.0)", [Scheduler])


@pytest.mark.parametrize(
    "schedule, message",
    [
        (lambda view: Schedule((ScheduledRow("nobody", 1),)), "request 'nobody', which is unknown"),
        (lambda view: Schedule((ScheduledRow("r", 1), ScheduledRow("r", 1))), "for request 'r', which has one already"),
        (lambda view: Schedule((ScheduledRow("r", 21),)), "gave 21 tokens to request 'r', which has 20 left"),
        (lambda view: Schedule((ScheduledRow("r", 0),)), "gave 0 tokens"),
        (lambda view: Schedule(()), "admitted none of 1 requests"),
        (lambda view: Schedule((ScheduledRow("r", 1.0),)), r"gave 1\.0 tokens"),
        (lambda view: Schedule(ScheduledRow("r", 1)), "expected rows and preempt_order as tuples"),
        (lambda view: 1 / 0, r"raised ZeroDivisionError: division by zero \(test_planning\.py:\d+\)"),
        (lambda view: exit(3), r"raised SystemExit: 3"),
        (lambda view: None, "returned None, expected a Schedule"),
        (lambda view: Schedule((("r", 1),)), r"returned a row \('r', 1\), expected a ScheduledRow"),
    ],
)
def test_a_scheduler_that_breaks_its_contract_is_named(schedule, message):
    simulation = simulate("scheduler=continuous")
    scheduled_by(simulation, schedule)
    simulation.core.submit(request())
    with pytest.raises(PluginError, match=message) as raised:
        simulation.core.step()
    assert str(raised.value).startswith("scheduler=mine (from engine-mine 0.3.0): plan() ")


def test_a_scheduler_sees_bounds_of_what_steps_in_flight_bring():
    simulation, seen = simulate(in_flight=2, drafts=3), []
    schedule = simulation.core._planner._scheduler.plan

    def watched(view):
        seen.extend((row.known, row.computed, row.num_draft_tokens) for row in view.running)
        return schedule(view)

    scheduled_by(simulation, watched)
    simulation.core.submit(request(max_tokens=100))
    simulation.core.step()
    simulation.core.step()
    assert seen == [(21, 20, 3), (25, 24, 3)]


def test_drafts_are_left_out_where_no_block_is_free_and_nobody_is_preempted_for_them():
    simulation = simulate("kv_allocator=paged", in_flight=1, drafts=4, accuracy=1.0, kv_tokens=32)
    outputs = simulation.serve(request(prompt=tuple(range(20)), max_tokens=12))
    assert outputs["r"] == expected(request(max_tokens=12))
    assert not any(plan.admits for plan in simulation.device.plans[1:])


def test_a_prompt_that_ends_asks_for_drafts_after_it():
    simulation = simulate(drafts=3)
    simulation.core.submit(request(prompt=tuple(range(90))))
    simulation.core.step()
    simulation.core.step()
    plans = simulation.device.plans
    assert [(plan.rows[0].num_tokens, plan.rows[0].samples, plan.rows[0].wants_drafts) for plan in plans[:2]] == [
        (64, False, 0), (26, True, 3)
    ]  # fmt: skip
    assert all(plan.syncs_drafter for plan in plans[:2])


def test_an_admission_tells_of_its_prefix_hit_once():
    simulation = simulate("kv_allocator=prefix_cache")
    simulation.serve(request("first"))
    simulation.core.submit(request("again"))
    events = []
    while simulation.core.has_work:
        events += [event for event in simulation.core.step().events if isinstance(event, PrefixCacheEvent)]
    assert [(event.queries, event.hits) for event in events] == [(20, 19)]


def test_a_row_is_sent_each_block_once():
    simulation = simulate(in_flight=2)
    simulation.serve(request(max_tokens=60))
    rows = [plan.rows[0] for plan in simulation.device.plans]
    news = [new for row in rows for new in row.new_blocks]
    sent = [block for new in news for block in new.blocks]
    assert len(sent) == len(set(sent))
    starts = [new.start for new in news]
    assert starts == sorted(set(starts))
