import random
from itertools import pairwise

import pytest

from engine.contracts.scheduler import StepCost
from engine.loop.width import WidthController

MEMORY_BOUND = StepCost(base_ms=10.0, per_token_ms=0.05, num_samples=100)
COMPUTE_BOUND = StepCost(base_ms=0.1, per_token_ms=1.0, num_samples=100)
PLENTY = 1000


def chain(rate, width, rng):
    accepted = 0
    while accepted < width and rng.random() < rate:
        accepted += 1
    return accepted


def serve(controller, rate, steps, *, batch=1, cost=MEMORY_BOUND, draft_ms=0.1, seed=0):
    """Widths of each step when drafts stand with the given rate."""
    rng = random.Random(seed)
    widths = []
    for _ in range(steps):
        asked = [controller.width(batch, cost, PLENTY) for _ in range(batch)]
        accepted = sum(chain(rate, width, rng) for width in asked)
        controller.observe(batch, sum(asked), accepted, draft_ms * max(asked))
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
    assert controller.width(16, COMPUTE_BOUND, PLENTY) == 0
    serve(controller, 1.0, 600, batch=16)
    assert controller.width(16, MEMORY_BOUND, PLENTY) == 4


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_last_token_is_never_drafted(adaptive):
    controller = WidthController(4, adaptive)
    assert [controller.width(1, MEMORY_BOUND, left) for left in (0, 1, 2, 3, 5, 9)] == [0, 0, 1, 2, 4, 4]


def test_not_adaptive_always_means_the_full_width():
    controller = WidthController(3, adaptive=False)
    assert serve(controller, 0.0, 200) == [3] * 200


def test_a_width_of_zero_stays_zero():
    controller = WidthController(0)
    assert serve(controller, 0.0, 20) == [0] * 20


def test_the_first_steps_draft_before_anything_is_measured():
    assert WidthController(4).width(1, StepCost(0.0, 0.0, 0), PLENTY) == 4


def test_the_same_measurements_give_the_same_widths():
    runs = [serve(WidthController(6), 0.6, 300, batch=3, seed=9) for _ in range(2)]
    assert runs[0] == runs[1]


def test_the_width_does_not_flap_at_the_border():
    widths = serve(WidthController(8), 0.6, 2000, seed=2)[200:]
    changes = sum(a != b for a, b in pairwise(widths))
    assert changes < 200
