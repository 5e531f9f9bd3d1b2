"""The step loop by itself: on a virtual clock, with any number of steps in flight, through failures."""

import random
import threading
import time

import pytest
from msgspec import structs

from engine.contracts.events import StepEvent
from engine.contracts.request import EngineRequest, SamplingParams
from engine.plugin_guard.calls import PluginError
from engine.step.plan import DrafterBroken, StepPlan
from tests.laws.harness import BLOCK, expected, random_requests
from tests.selection import few

from .simulated import simulate

DEPTHS = (1, 2, 4)


def greedy(name: str, prompt: tuple[int, ...], max_tokens: int) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0))


def assert_all_given_back(simulation):
    stats = simulation.core.stats()
    assert (stats.running, stats.waiting, stats.rows_used, stats.blocks_leased) == (0, 0, 0, 0)
    simulation.allocator.check()


def test_the_loop_never_reads_the_hosts_time(monkeypatch):
    simulation = simulate("drafter=ngram", "drafter.adaptive=false")
    loop = threading.get_ident()

    def forbidden(told):
        def ask():
            assert threading.get_ident() != loop, "the loop asked the host for the time"
            return told()

        return ask

    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time", "time_ns", "monotonic_ns"):
        monkeypatch.setattr(time, name, forbidden(getattr(time, name)))
    outputs = simulation.serve(*(requests := random_requests(1, 8)))
    simulation.core.close()
    monkeypatch.undo()
    assert outputs == {r.request_id: expected(r) for r in requests}


def test_times_are_those_of_the_given_clock():
    simulation = simulate("drafter=none", in_flight=1, ms=lambda plan: 250.0)
    simulation.core.submit(greedy("r", (1, 2, 3), 5))
    events, timings = [], None
    while simulation.core.has_work:
        out = simulation.core.step()
        events += [event for event in out.events if isinstance(event, StepEvent)]
        timings = next((o.timings for o in out.outputs if o.timings), timings)
    assert [round(event.device_ms) for event in events] == [250] * 5
    assert timings is not None
    assert (round(timings.prefill_ms), round(timings.decode_ms)) == (250, 1000)


@few(3)
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("in_flight", DEPTHS)
def test_any_number_of_steps_in_flight_gives_the_same_tokens_and_everything_back(in_flight, drafts):
    for accuracy in (0.0, 0.6, 1.0):
        simulation = simulate("scheduler.max_requests=5", in_flight=in_flight, drafts=drafts, accuracy=accuracy)
        requests = random_requests(in_flight, 14)
        assert simulation.serve(*requests) == {r.request_id: expected(r) for r in requests}
        assert_all_given_back(simulation)


@few(3)
@pytest.mark.parametrize("plugins", [(), ("scheduler=static",), ("kv_allocator=contiguous",)])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_prompt_that_fills_the_context_is_computed_if_nothing_is_to_follow(plugins, drafts):
    simulation = simulate(*plugins, drafts=drafts, max_len=64, kv_tokens=64 * 3)
    for length, max_tokens in ((64, 0), (63, 0), (63, 1), (64, 1), (65, 0)):
        simulation.core.submit(greedy(f"{length}+{max_tokens}", tuple(range(1, length + 1)), max_tokens))
    ended = {}
    while simulation.core.has_work:
        ended |= {out.request_id: out for out in simulation.core.step().outputs if out.finish_reason}
    assert {name: (out.finish_reason, out.error) for name, out in ended.items()} == {
        "64+0": ("length", ""),
        "63+0": ("length", ""),
        "63+1": ("length", ""),
        "64+1": ("error", "the prompt has 64 tokens, at most 63 fit"),
        "65+0": ("error", "the prompt has 65 tokens, at most 64 fit"),
    }
    assert_all_given_back(simulation)


def test_an_output_that_another_engine_has_begun_is_ended_here_and_counted_as_one():
    simulation = simulate(drafts=2)
    whole = greedy("r", tuple(range(1, 30)), 20)
    tokens = expected(whole)
    for begun in range(20):
        request = structs.replace(whole, request_id=f"r{begun}", output=tuple(tokens[:begun]))
        assert simulation.serve(request) == {f"r{begun}": tokens[begun:]}
    simulation.core.submit(structs.replace(whole, output=tuple(tokens)))
    (refused,) = simulation.core.step().outputs
    assert refused.error == "the output has 20 tokens already, and may have 20"
    assert_all_given_back(simulation)


@pytest.mark.parametrize("in_flight", DEPTHS)
def test_so_many_steps_are_launched_before_the_first_is_waited_for(in_flight):
    """With drafts, too: the next step does not wait for what became of them."""
    simulation = simulate(in_flight=in_flight, drafts=2)
    launched = len(simulation.device.plans)
    simulation.core.submit(greedy("r", (1, 2, 3), 100))
    simulation.core.step()
    assert len(simulation.device.plans) - launched == in_flight
    assert all(plan.rows[0].num_drafts == 2 for plan in simulation.device.plans[1:])


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_heartbeat_from_within_a_launch_says_how_long_the_step_may_take(in_flight):
    """A device without a thread of its own computes there: its engine must not look as if it hung."""
    simulation = simulate(ms=lambda plan: 1000.0 * plan.num_tokens, in_flight=in_flight)
    simulation.serve(greedy("before", range(20), 20))
    core, launch, beats = simulation.core, simulation.device.launch, []

    def launched(plan):
        simulation.device.clock.now += 30.0
        beats.append((plan.num_tokens, core.heartbeat()))
        return launch(plan)

    simulation.device.launch = launched
    simulation.serve(greedy("r", range(30, 50), 4))
    tokens, beat = beats[0]
    assert tokens == 20 and beat.step_s == 30.0 and beat.expected_s == pytest.approx(20.0, rel=0.2)
    assert all(beat.expected_s > 0.0 for _, beat in beats)


def test_positions_of_a_plan_are_bounds_that_hold_if_all_drafts_are_accepted():
    simulation = simulate(in_flight=3, drafts=2, accuracy=0.5)
    simulation.core.submit(greedy("r", (1, 2, 3, 4), 200))
    simulation.core.step()
    starts = [plan.rows[0].max_start for plan in simulation.device.plans[:3]]
    assert starts == [0, 4, 7]


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_no_draft_is_verified_that_could_not_be_part_of_the_output(limit):
    simulation = simulate(drafts=4, accuracy=1.0)
    request = greedy("r", (1, 2, 3), limit)
    assert simulation.serve(request)["r"] == expected(request)
    bounds = [row.max_end for plan in simulation.device.plans for row in plan.rows]
    assert max(bounds) < len(request.prompt) + limit


@few(3)
@pytest.mark.parametrize("in_flight", DEPTHS)
@pytest.mark.parametrize("drafts", [0, 3])
def test_preemption_under_memory_pressure_changes_no_token(in_flight, drafts):
    simulation = simulate("kv_allocator=paged", in_flight=in_flight, drafts=drafts, kv_tokens=160)
    requests = [greedy(f"r{i}", tuple(range(i, i + 20)), 40) for i in range(6)]
    assert simulation.serve(*requests) == {r.request_id: expected(r) for r in requests}
    assert any(plan.admits for plan in simulation.device.plans[6:]), "somebody was admitted again"
    assert_all_given_back(simulation)


@pytest.mark.parametrize("in_flight", DEPTHS)
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_step_that_fails_is_done_again_row_by_row_and_the_guilty_request_fails_alone(in_flight, drafts):
    simulation = simulate(in_flight=in_flight, drafts=drafts)
    guilty_rows: set[int] = set()

    def fail(plan: StepPlan) -> Exception | None:
        guilty_rows.update(admit.row_id for admit in plan.admits if admit.tokens[0] == 42)
        return RuntimeError("boom") if guilty_rows & {row.row_id for row in plan.rows} else None

    simulation.device.fail = fail
    requests = [greedy(f"r{i}", (i, 5, 6, 7), 20) for i in range(4)]
    errors, outputs = {}, {r.request_id: [] for r in requests}
    simulation.serve(*requests[:2])
    for request in (*(greedy(f"s{i}", (i, 5, 6, 7), 20) for i in range(2)), greedy("bad", (42, 1), 5)):
        simulation.core.submit(request)
        outputs.setdefault(request.request_id, [])
    while simulation.core.has_work:
        for out in simulation.core.step().outputs:
            outputs[out.request_id] += out.tokens
            if out.error:
                errors[out.request_id] = out.error
    assert errors == {"bad": "RuntimeError: boom"}
    assert all(outputs[f"s{i}"] == expected(requests[i]) for i in range(2))
    assert_all_given_back(simulation)


def test_drafts_that_are_no_tokens_end_the_engine_and_name_the_drafter():
    simulation = simulate(drafts=2)
    simulation.device.fail = lambda plan: DrafterBroken("token ids outside of the vocabulary")
    simulation.core.submit(greedy("r", (1, 2, 3), 4))
    with pytest.raises(PluginError, match=r"propose\(\) .*outside of the vocabulary"):
        simulation.core.step()


@pytest.mark.parametrize("in_flight", DEPTHS)
def test_aborts_at_random_moments_leak_nothing_and_disturb_nobody(in_flight):
    simulation, rng = simulate(in_flight=in_flight, drafts=3, kv_tokens=512), random.Random(3)
    requests = random_requests(4, 20, longest=40)
    outputs = {r.request_id: [] for r in requests}
    aborted = set()
    for request in requests:
        simulation.core.submit(request)
    while simulation.core.has_work:
        if rng.random() < 0.3:
            simulation.core.abort([rng.choice(requests).request_id])
        for out in simulation.core.step().outputs:
            outputs[out.request_id] += out.tokens
            aborted |= {out.request_id} if out.finish_reason == "abort" else set()
    assert 0 < len(aborted) < len(requests)
    for request in requests:
        got = outputs[request.request_id]
        assert got == (expected(request)[: len(got)] if request.request_id in aborted else expected(request))
    assert_all_given_back(simulation)


def test_useless_drafts_are_soon_asked_for_no_more_but_tried_again():
    simulation = simulate(drafts=4, adaptive=True, accuracy=0.0, ms=lambda plan: 5.0 + 0.5 * plan.num_tokens)
    for wave in range(2):  # a drafter lacks keys of who decoded without it, so a trial waits for new requests
        simulation.serve(*(greedy(f"{wave}-{i}", (i, 1, 2), 240) for i in range(8)))
    plans = [plan for plan in simulation.device.plans if not plan.admits]
    assert any(row.num_drafts for plan in plans[:16] for row in plan.rows)
    drafted = [plan for plan in plans[60:] if any(row.num_drafts for row in plan.rows)]
    assert 0 < len(drafted) < 0.1 * len(plans[60:])
    assert sum(not plan.syncs_drafter for plan in plans[60:]) > 0.9 * len(plans[60:])


@pytest.mark.parametrize(("idle_s", "cached"), [(299.0, 4 * BLOCK), (301.0, 0)])
def test_a_prompt_is_retained_to_the_minute_and_with_every_use_anew(idle_s, cached):
    simulation = simulate("kv_allocator=prefix_cache", kv_tokens=16 * BLOCK)
    clock, found = simulation.device.clock, []

    def served(name, prompt, **words):
        simulation.core.submit(EngineRequest(name, prompt, SamplingParams(max_tokens=1), **words))
        while simulation.core.has_work:
            found.extend(out.timings for out in simulation.core.step().outputs if out.timings is not None)
        return found[-1]

    kept = tuple(range(4 * BLOCK + 1))
    assert served("kept", kept, retain=((4 * BLOCK, 300.0), (3, 3600.0))).retained_tokens == 4 * BLOCK
    clock.now += 290.0
    assert served("used", kept).cached_tokens == 4 * BLOCK
    clock.now += idle_s
    for other in range(12):
        served(f"other-{other}", tuple(range(40 + other, 40 + other + 3 * BLOCK)))
    assert served("again", kept).cached_tokens == cached
    simulation.core.reset_prefix_cache()
    assert served("reset", kept).cached_tokens == 0
