"""The number of drafts follows what is measured: acceptance, step times, batch size."""

import itertools
import random

import pytest

from engine.drafting.policy import BUCKETS, RETRY, TRIAL, DraftPolicy

MOST = 7


def decode(policy, batch, accuracy, ms, steps, seed=0):
    """Steps of a batch whose drafts are right with the chance ``accuracy``; the numbers of drafts that were asked."""
    rng, asked = random.Random(seed), []
    for _ in range(steps):
        drafts = policy.num_draft_tokens(batch)
        chains = []
        for _ in range(batch):
            accepted = 0
            while accepted < drafts and rng.random() < accuracy:
                accepted += 1
            chains.append((drafts, accepted))
        policy.observe(chains, ms(drafts) * (1.0 + 0.04 * rng.random()) * (4.0 if rng.random() < 0.01 else 1.0))
        asked.append(drafts)
    return asked


def memory_bound(drafts):
    return 10.0 + 0.1 * drafts


def compute_bound(drafts):
    return 10.0 * (1 + drafts)


def usual(asked):
    return max(set(asked), key=asked.count)


@pytest.mark.parametrize("batch", [1, 5, 40])
def test_good_drafts_that_cost_little_are_asked_for_in_full(batch):
    assert usual(decode(DraftPolicy(MOST), batch, 0.95, memory_bound, 400)[100:]) == MOST


@pytest.mark.parametrize("accuracy, ms", [(0.0, lambda w: 10.0 + w), (0.9, compute_bound)])
def test_drafts_that_do_not_pay_are_asked_for_in_trials_only(accuracy, ms):
    asked = decode(DraftPolicy(MOST), 16, accuracy, ms, 2000)[100:]
    assert usual(asked) == 0 and any(asked)
    assert sum(map(ms, asked)) < 1.04 * len(asked) * ms(0) or ms is compute_bound
    assert sum(drafts > 0 for drafts in asked) <= (0.04 if ms is compute_bound else 0.13) * len(asked)


def test_the_number_with_the_most_tokens_per_millisecond_is_found():
    asked = decode(DraftPolicy(MOST), 1, 0.6, lambda drafts: 5.0 + 1.5 * drafts, 1200)[300:]
    rates = [sum(0.6**i for i in range(drafts + 1)) / (5.0 + 1.5 * drafts) for drafts in range(MOST + 1)]
    assert rates[usual(asked)] > 0.95 * max(rates)


def test_a_cost_that_is_concave_in_tokens_is_no_line():
    """As of experts: the first few tokens make each expert's weights be read, more of them cost nothing."""
    asked = decode(DraftPolicy(MOST), 1, 0.85, lambda drafts: 10.0 if drafts == 0 else 16.0, 1500)[300:]
    assert usual(asked) == MOST


def test_drafting_comes_back_when_drafts_become_good():
    policy = DraftPolicy(MOST)
    decode(policy, 4, 0.0, memory_bound, 400)
    assert usual(decode(policy, 4, 0.9, memory_bound, 6 * RETRY)[-RETRY:]) > 2


def test_short_chains_grow_with_the_text_and_wait_for_no_trial():
    """Positions that are not drafted age: what a hard text said of them does not keep chains short on an easy one."""
    policy = DraftPolicy(MOST)
    decode(policy, 1, 0.45, lambda drafts: 10.0 + 3.0 * drafts, 1000)
    steps = decode(policy, 1, 0.95, lambda drafts: 10.0 + 3.0 * drafts, RETRY // 2)
    assert usual(steps[-TRIAL * 4 :]) > 3


def test_what_one_range_learned_of_a_hard_text_does_not_hold_for_ever_in_another():
    policy = DraftPolicy(MOST)
    decode(policy, 16, 0.45, lambda drafts: 10.0 + 0.1 * drafts, 600)
    decode(policy, 1, 0.45, lambda drafts: 10.0 + 3.0 * drafts, 1000)
    steps = decode(policy, 1, 0.95, lambda drafts: 10.0 + 3.0 * drafts, RETRY)
    assert usual(steps[-TRIAL * 4 :]) > 3


@pytest.mark.parametrize("added", [0.3, 1.0, 2.0])
def test_trials_of_useless_drafts_cost_a_fixed_share_of_the_time(added):
    def ms(drafts):
        return 10.0 * (1.0 + added * (drafts > 0))

    asked = decode(DraftPolicy(MOST), 16, 0.0, ms, 12 * RETRY)[RETRY:]
    assert 0.005 < sum(map(ms, asked)) / (10.0 * len(asked)) - 1.0 < 0.025


def test_ranges_of_batch_sizes_learn_by_themselves():
    policy = DraftPolicy(MOST)
    for round_number in range(4):
        small = decode(policy, 1, 0.8, memory_bound, 100, seed=round_number)
        large = decode(policy, 32, 0.8, compute_bound, 100, seed=round_number)
    assert usual(small) == MOST and usual(large) == 0


def test_an_unseen_range_expects_what_others_saw():
    policy = DraftPolicy(MOST)
    decode(policy, 1, 0.0, memory_bound, 200)
    assert policy.tokens(BUCKETS[3])[MOST] < 1.2 < DraftPolicy(MOST).tokens(BUCKETS[3])[MOST]


def test_a_drafter_with_nothing_to_say_counts_as_wrong():
    policy = DraftPolicy(MOST)
    for _ in range(400):
        drafts = policy.num_draft_tokens(1)
        policy.observe([(drafts, 0)], 10.0 + 0.5 * drafts)
    assert policy.tokens(1)[MOST] < 1.1 and policy.num_draft_tokens(1) == 0


def test_noise_does_not_make_it_change_its_mind():
    asked = decode(DraftPolicy(MOST), 2, 0.7, lambda drafts: 10.0 + 2.6 * drafts, 3000)[500:]
    settled = [k for i, k in enumerate(asked) if asked[max(0, i - TRIAL) : i + TRIAL + 1].count(k) > TRIAL]
    changes = sum(a != b for a, b in itertools.pairwise(settled))
    assert changes <= 2 * len(asked) / RETRY


def test_the_same_observations_give_the_same_numbers():
    runs = [decode(DraftPolicy(MOST), 3, 0.7, memory_bound, 500) for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_fixed_number_learns_nothing():
    policy = DraftPolicy(MOST, adaptive=False)
    assert set(decode(policy, 8, 0.0, compute_bound, 100)) == {MOST}


def test_no_drafts_are_wanted_of_a_drafter_that_makes_none():
    assert decode(DraftPolicy(0), 8, 0.0, memory_bound, 10) == [0] * 10
