import random
from itertools import pairwise

import pytest

from engine.contracts.scheduler import StepCost
from engine.loop.draft_cost import DraftCost
from engine.loop.width import WidthController

MEMORY_BOUND = StepCost(base_ms=10.0, per_token_ms=0.05, num_samples=100)
COMPUTE_BOUND = StepCost(base_ms=0.1, per_token_ms=1.0, num_samples=100)
PLENTY = 1000


def chain(rate, width, rng):
    accepted = 0
    while accepted < width and rng.random() < rate:
        accepted += 1
    return accepted


def serve(
    controller,
    rate,
    steps,
    *,
    batch=1,
    cost=MEMORY_BOUND,
    draft_ms=0.1,
    fixed_ms=0.0,
    answered=1.0,
    remaining=0,
    seed=0,
):
    """Widths of each step when drafts stand with the given rate, for the share ``answered`` of the requests."""
    rng = random.Random(seed)
    widths = []
    for step in range(steps):
        # Requests end now and then, so the last widths are small.
        left = remaining - step % remaining if remaining else PLENTY
        asked = [max(0, min(controller.width(batch, cost), left - 1))] * batch
        drafts = [width if rng.random() < answered else 0 for width in asked]
        accepted = sum(chain(rate, width, rng) for width in drafts)
        controller.observe_answers(batch, sum(map(bool, asked)), sum(map(bool, drafts)))
        controller.observe(batch, sum(map(bool, drafts)), sum(drafts), accepted)
        controller.observe_cost(batch, max(asked), fixed_ms + draft_ms * max(asked))
        widths.append(max(asked))
    return widths


def test_useless_drafts_are_switched_off_except_for_rare_probes():
    controller = WidthController(8)
    widths = serve(controller, 0.0, 1000)
    assert max(widths[50:]) <= 1
    assert 1 <= sum(widths[50:]) <= 950 / 16


def test_drafting_comes_back_when_it_pays_again():
    controller = WidthController(8)
    serve(controller, 0.0, 500)
    widths = serve(controller, 0.95, 1000)
    assert min(widths[-300:]) >= 4


def test_drafts_that_were_on_their_way_when_drafting_went_off_are_no_probe():
    late, none = WidthController(6), WidthController(6)
    for controller in (late, none):
        serve(controller, 0.0, 300, cost=COMPUTE_BOUND)
        assert controller.width(1, COMPUTE_BOUND) == 0
        while controller.probes(1):
            controller.observe(1, 1, 1, 0)
    late.observe(1, chains=1, drafted=6, accepted=6)
    assert steps_to_probe(late) == steps_to_probe(none)


def steps_to_probe(controller):
    for step in range(1000):
        controller.width(1, COMPUTE_BOUND)
        if controller.probes(1):
            return step
        controller.observe(1, 0, 0, 0)
    raise AssertionError("no probe")


def test_good_drafts_get_long_chains_and_poor_ones_short_chains():
    good, poor = WidthController(8), WidthController(8)
    assert serve(good, 0.97, 300)[-1] == 8
    assert serve(poor, 0.3, 300)[-1] in (1, 2, 3)


def test_where_compute_is_the_limit_only_near_certain_drafts_are_worth_it():
    assert max(serve(WidthController(4), 0.5, 200, batch=8, cost=COMPUTE_BOUND)[-10:]) <= 1
    assert serve(WidthController(4), 0.5, 200, batch=1, cost=MEMORY_BOUND)[-1] == 4


def test_slow_drafting_shortens_the_chain():
    assert serve(WidthController(8), 0.7, 300, draft_ms=20.0)[-1] < serve(WidthController(8), 0.7, 300)[-1]


def test_buckets_are_independent_but_new_ones_start_from_what_is_known():
    controller = WidthController(4)
    serve(controller, 0.0, 200, batch=1, cost=COMPUTE_BOUND)
    assert controller.width(16, COMPUTE_BOUND) == 0
    serve(controller, 1.0, 600, batch=16)
    assert controller.width(16, MEMORY_BOUND) == 4


def test_for_more_requests_drafting_costs_no_less_than_is_known_for_fewer():
    """Until it is measured: a drafter that is too dear for eight requests is not tried on sixteen."""
    cost = StepCost(base_ms=2.0, per_token_ms=0.1, num_samples=100)
    for dear in (False, True):
        controller = WidthController(3)
        serve(controller, 0.7, 300, batch=8, cost=cost, draft_ms=2.0 if dear else 0.1)
        assert (controller.width(8, cost) == 0) == dear
        assert (controller.width(16, cost) == 0) == dear
        assert controller.width(4, cost) == 3  # nothing is known of less


def test_a_probe_whose_drafts_are_dropped_ends_and_the_next_one_comes_soon():
    """Requests that come together ask for drafts together; when some have ended at once, nobody verifies them."""
    controller = off_for_long(0.0)
    assert probe(controller, 16) > 16
    controller.asked_for(16)
    assert controller.width(16, MEMORY_BOUND) == 1  # still awaited
    controller.dropped()
    assert not controller.probes(16)
    assert 4 < probe(controller, 16) <= 16


def test_drafts_tell_of_the_batch_size_that_asked_for_them_whatever_it_is_by_then():
    controller = off_for_long(0.0)
    probe(controller, 16)
    controller.asked_for(8)
    controller.dropped()
    assert controller.probes(16), "these were not its drafts"
    controller.asked_for(16)
    controller.observe(8, 8, 8, 0)
    assert not controller.probes(16)
    assert probe(controller, 16) > 16, "they were judged"


def test_not_adaptive_always_means_the_full_width():
    controller = WidthController(3, adaptive=False)
    assert serve(controller, 0.0, 200) == [3] * 200


def test_a_width_of_zero_stays_zero():
    controller = WidthController(0)
    assert serve(controller, 0.0, 20) == [0] * 20


def test_the_first_steps_draft_before_anything_is_measured():
    assert WidthController(4).width(1, StepCost(0.0, 0.0, 0)) == 4


def test_the_same_measurements_give_the_same_widths():
    runs = [serve(WidthController(6), 0.6, 300, batch=3, seed=9) for _ in range(2)]
    assert runs[0] == runs[1]


def test_the_width_does_not_flap_at_the_border():
    widths = serve(WidthController(8), 0.6, 2000, seed=2)[200:]
    changes = sum(a != b for a, b in pairwise(widths))
    assert changes < 200


def test_load_switches_drafting_off_and_its_end_switches_it_on_again():
    controller = WidthController(6)
    for _ in range(2):
        assert serve(controller, 0.6, 100, batch=1)[-1] >= 3
        crowded = serve(controller, 0.6, 300, batch=32, cost=COMPUTE_BOUND)
        assert sum(crowded[100:]) <= 200 / 4


@pytest.mark.parametrize(("plain_ms", "drafts"), [(5.0, False), (20.0, True)])
def test_steps_that_are_off_the_line_of_all_steps_are_known_to_be(plain_ms, drafts):
    controller = WidthController(4)
    serve(controller, 0.35, 50, draft_ms=2.0)
    for _ in range(60):
        controller.observe_step(1, 1, plain_ms)
    assert (controller.width(1, MEMORY_BOUND) > 0 and not controller.probes(1)) == drafts


def test_what_a_round_costs_anyway_is_no_reason_against_drafting():
    """A drafter on the device keeps up with the target at width 0, too."""
    costly = {"draft_ms": 1.0, "fixed_ms": 20.0, "remaining": 20}
    fixed, none = WidthController(6), WidthController(6)
    assert max(serve(fixed, 0.6, 400, **costly)[-20:]) >= 4
    assert max(serve(none, 0.6, 400, **(costly | {"draft_ms": 8.0, "fixed_ms": 0.0}))[-20:]) < 3


def test_a_drafter_that_seldom_has_an_answer_is_not_asked_if_asking_is_dear():
    """The device waits while a drafter on the host looks at its tokens, whatever comes of it."""
    asking = {"draft_ms": 2.0, "batch": 4}
    assert max(serve(WidthController(4), 0.9, 400, answered=0.05, **asking)[-10:]) <= 1
    assert min(serve(WidthController(4), 0.9, 400, answered=0.95, **asking)[-10:]) >= 3


def test_the_cost_of_drafting_is_split_into_a_fixed_part_and_one_per_token():
    cost = DraftCost()
    for width in (4, 4, 0, 4, 2, 3, 4, 4, 1) * 5:
        cost.observe(width, 3.0 + 0.5 * width)
    for _ in range(500):
        cost.observe(4, 5.0)
    assert [cost.ms(width) for width in (0, 2, 4, 8)] == pytest.approx([3.0, 4.0, 5.0, 7.0])


def test_of_one_width_alone_all_cost_is_per_token_and_a_pause_counts_little():
    cost = DraftCost()
    for _ in range(20):
        cost.observe(4, 2.0)
    assert [cost.ms(width) for width in (0, 2, 4)] == pytest.approx([0.0, 1.0, 2.0])
    cost.observe(4, 1000.0)
    assert cost.ms(4) < 3.0


def test_a_probe_of_one_token_does_not_make_long_drafts_look_dear():
    cost = DraftCost()
    for _ in range(50):
        cost.observe(0, 0.2)
        cost.observe(6, 2.0 + 0.1 * 6)
        cost.observe(5, 2.0 + 0.1 * 5)
    for _ in range(40):
        cost.observe(0, 0.2)
        cost.observe(1, 2.0 + 0.1)
    assert [cost.ms(width) for width in (0, 1, 6)] == pytest.approx([0.2, 2.1, 2.6], rel=0.02)


def test_drafting_that_was_never_tried_is_not_known_to_cost_anything():
    cost = DraftCost()
    assert cost.ms(4) == 0.0
    cost.observe(0, 1.5)
    assert cost.ms(4) == cost.ms(0) == 1.5


# Rest ---------------------------------------------------------------------------------------------------------------


def off_for_long(share, batch=16, **options):
    """A controller whose drafts never stood, and for whom keeping up takes a share of each step."""
    controller = WidthController(4)
    for _ in range(60):
        serve(controller, 0.0, 5, batch=batch, **options)
        controller.observe_keeping_up(batch, 10.0, 10.0 * share)
    return controller


def probe(controller, batch, most=1000):
    """Go on without drafts until a probe begins."""
    for step in range(most):
        if controller.probes(batch):
            return step
        controller.observe(batch, 0, 0, 0)
    raise AssertionError("no probe")


def test_drafting_rests_only_when_off_for_long_and_where_keeping_up_is_dear():
    assert off_for_long(share=0.1).rests(16)
    assert not off_for_long(share=0.01).rests(16)
    fresh = WidthController(4)
    for _ in range(20):
        fresh.observe_keeping_up(16, 10.0, 1.0)
        fresh.width(16, COMPUTE_BOUND)
    assert not fresh.rests(16), "not off for long"
    pays = WidthController(4)
    serve(pays, 1.0, 300, batch=16)
    pays.observe_keeping_up(16, 10.0, 9.0)
    assert not pays.rests(16), "not off at all"
    assert not off_for_long(share=0.1).rests(1), "other batch sizes are no evidence"


def test_steps_that_a_drafter_is_told_of_late_count_once_and_a_pause_of_the_machine_hardly():
    late, pause = WidthController(4), WidthController(4)
    for _ in range(50):
        for _ in range(3):
            late.observe_keeping_up(16, 10.0, 0.1)
        late.observe_keeping_up(16, 10.0, 0.1, late_ms=4.0, late_steps=4)
        pause.observe_keeping_up(16, 10.0, 0.1)
    assert late._buckets[4].keeping_up.share == pytest.approx(0.11, rel=0.15)
    pause.observe_keeping_up(16, 10.0, 1000.0)
    assert pause._buckets[4].keeping_up.share < 0.03


def test_at_rest_a_probe_waits_for_new_requests_and_for_as_many_chains_as_say_something():
    controller = off_for_long(share=0.1, cost=COMPUTE_BOUND)
    probe(controller, 16)
    for _ in range(500):
        controller.observe(16, 0, 0, 0)
    assert controller.probes(16) and not controller.rests(16), "nobody could take part yet"
    for _ in range(7):
        controller.asked_for(16)
        controller.observe(16, 1, 1, 1)
    assert controller.probes(16)
    controller.observe(16, 1, 1, 0)
    assert not controller.probes(16)


def test_a_promising_probe_ends_the_rest_and_a_poor_one_does_not():
    for accepted, rests in ((0, True), (8, False)):
        controller = off_for_long(share=0.1)
        probe(controller, 16)
        controller.observe(16, 8, 8, accepted)
        assert controller.rests(16) is rests


def test_without_adaptive_width_there_is_no_rest():
    controller = WidthController(4, adaptive=False)
    controller.observe_keeping_up(16, 10.0, 9.0)
    for _ in range(1000):
        controller.observe(16, 0, 0, 0)
    assert not controller.rests(16)
