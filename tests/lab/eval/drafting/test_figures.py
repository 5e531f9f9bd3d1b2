"""What follows from counts and times, on numbers worked out by hand."""

import pytest

from engine_lab.eval.drafting.figures import drafted_figures, plain_figures, upper_bound
from engine_lab.eval.drafting.worker import Run


def plain(wall_ms=500.0):
    """100 steps of one request: 4 ms on the device, 1 ms besides."""
    return Run(decode_steps=100, tokens=100, wall_ms=wall_ms, verify_ms=400.0)


def drafted(wall_ms=400.0, **changes):
    """50 decode steps with 2 drafts each, half accepted at either position: 1 ms to draft, 5 to verify, 2 besides."""
    fields = {"decode_steps": 50, "tokens": 100, "wall_ms": wall_ms, "verify_ms": 250.0, "draft_ms": 50.0}
    fields |= {"chains": 50, "drafted": 100, "tried": [50, 40], "accepted_at": [40, 10]}
    return Run(**(fields | changes))


def test_a_round_is_split_into_drafting_verifying_and_the_rest():
    found = drafted_figures([drafted()], [plain()])
    assert (found.draft_ms, found.verify_ms, found.rest_ms) == pytest.approx((1.0, 5.0, 2.0))
    assert (found.tokens_per_step, found.ms_per_token) == (2.0, 4.0)


def test_costs_are_in_steps_without_drafts_and_give_the_ideal():
    found = drafted_figures([drafted()], [plain()])
    assert (found.num_draft_tokens, found.draft_cost) == (2.0, 0.125)
    assert (found.drafting_cost, found.verify_cost) == (0.25, 1.25)
    assert found.ideal == pytest.approx(2.0 / (2 * 0.125 + 1.25))
    assert found.speed_up == 1.25 and found.reached == pytest.approx(1.25 / found.ideal)


def test_with_nothing_besides_the_ideal_is_reached():
    found = drafted_figures([drafted(wall_ms=300.0)], [plain(wall_ms=400.0)])
    assert found.rest_ms == 0.0 and found.reached == pytest.approx(1.0)


def test_acceptance_counts_drafts_whose_predecessors_were_accepted_over_all_passes():
    found = drafted_figures([drafted(), drafted(tried=[50, 10], accepted_at=[10])], [plain(), plain()])
    assert found.acceptance == pytest.approx((50 / 100, 10 / 50)) and found.accepted == 60


def test_steps_without_drafts_lower_the_mean_and_a_cost_of_nothing_is_not_claimed():
    found = drafted_figures([drafted(chains=0, drafted=0, tried=[], accepted_at=[], tokens=50)], [plain()])
    assert (found.num_draft_tokens, found.draft_cost, found.drafting_cost, found.acceptance) == (0.0, None, 0.25, ())


def test_speed_up_is_the_median_of_pairs_and_a_pause_in_one_of_them_is_not_it():
    runs = [drafted(), drafted(), drafted(wall_ms=4000.0)]
    found = drafted_figures(runs, [plain()] * 3)
    assert found.speed_up == 1.25 and found.slowdown == pytest.approx((0.8 + 0.8 + 8.0) / 3)


def test_the_bound_is_that_of_students_t():
    assert upper_bound([0.9, 1.1]) == pytest.approx(1.0 + 12.706 * 0.1, rel=1e-3)
    # Half of 41 ratios 0.1 below 1 and half above: standard error 0.1 / sqrt(40), t = 2.021 for 40 degrees.
    ratios = [0.9, 1.1] * 20 + [1.0]
    assert upper_bound(ratios) == pytest.approx(1.0 + 2.021 * 0.1 / 41**0.5, rel=1e-3)
    assert upper_bound([1.0]) is None


def test_answers_of_one_token_have_no_decoding_to_time():
    with pytest.raises(ValueError, match="more than one token"):
        plain_figures([plain(), Run()])
