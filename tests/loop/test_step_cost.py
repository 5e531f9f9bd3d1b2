import random

import pytest

from engine.contracts.step_cost import Mixture, StepCost, StepWork
from engine.loop.step_cost import StepCostModel


def work(count):
    return StepWork(num_tokens=count)


def feed(model, steps, *, base=4.0, per_token=0.02, noise=0.03, sizes=(1, 4, 8, 64, 512), seed=0):
    rng = random.Random(seed)
    for _ in range(steps):
        tokens = rng.choice(sizes)
        model.observe(work(tokens), (base + per_token * tokens) * (1 + rng.uniform(-noise, noise)))


def test_nothing_measured_says_so():
    assert StepCostModel().cost().num_samples == 0
    assert StepCostModel().cost().tokens_within(5.0) > 1_000_000


def test_the_line_is_found():
    model = StepCostModel()
    feed(model, 200)
    cost = model.cost()
    assert cost.base_ms == pytest.approx(4.0, rel=0.05)
    assert cost.per_token_ms == pytest.approx(0.02, rel=0.1)
    assert cost.num_samples == 200


def test_a_pause_of_the_machine_does_not_move_the_line():
    model = StepCostModel()
    feed(model, 200)
    before = model.cost().ms(work(64))
    model.observe(work(8), 900.0)
    model.observe(work(1), 500.0)
    assert model.cost().ms(work(64)) == pytest.approx(before, rel=0.05)
    assert model.cost().ms(work(1)) == pytest.approx(4.0, rel=0.1)


def test_a_slow_first_step_is_soon_forgiven():
    model = StepCostModel()
    model.observe(work(64), 3000.0)
    feed(model, 30)
    assert model.cost().ms(work(64)) == pytest.approx(4.0 + 1.28, rel=0.1)


@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_a_lasting_change_is_followed(factor):
    model = StepCostModel()
    feed(model, 300)
    feed(model, 400, base=4.0 * factor, per_token=0.02 * factor, seed=1)
    assert model.cost().ms(work(64)) == pytest.approx(5.28 * factor, rel=0.1)


def test_steps_of_one_size_keep_the_slope_that_was_known():
    model = StepCostModel()
    feed(model, 200)
    slope = model.cost().per_token_ms
    feed(model, 1000, sizes=(4,), seed=3)
    assert model.cost().per_token_ms == pytest.approx(slope, rel=0.5)
    assert model.cost().ms(work(4)) == pytest.approx(4.08, rel=0.05)


def test_coefficients_are_never_negative():
    falling, through_origin = StepCostModel(), StepCostModel()
    for n in range(1, 60):
        falling.observe(work(n), 100.0 - n)
        through_origin.observe(work(n + 10), 0.5 * n + 0.01)
    for cost in (falling.cost(), through_origin.cost()):
        assert cost.base_ms >= 0.0 and cost.per_token_ms >= 0.0
    assert falling.cost().per_token_ms == 0.0
    assert through_origin.cost().base_ms == 0.0


def test_empty_steps_are_not_samples():
    model = StepCostModel()
    model.observe(work(0), 1.0)
    model.observe(work(3), 0.0)
    assert model.cost().num_samples == 0


MIXTURE = Mixture(num_experts=64, top_k=8, share=0.6)


def test_tokens_share_experts_as_chance_has_it():
    rng = random.Random(0)
    for tokens in (1, 2, 8, 40):
        distinct = [len({e for _ in range(tokens) for e in rng.sample(range(64), 8)}) for _ in range(500)]
        assert MIXTURE.experts(tokens) == pytest.approx(sum(distinct) / 500, rel=0.01)


def test_a_step_reads_the_experts_of_all_of_its_tokens():
    cost = StepCost(10.0, 0.0, 1, (MIXTURE,))
    assert cost.ms(work(1)) == pytest.approx(10.0)
    assert cost.ms(work(100_000)) == pytest.approx(10.0 * (0.4 + 0.6 * 64 / 8))


@pytest.mark.parametrize("spread", [1.0, 0.5, 0.125, 0.0])
def test_the_costs_of_a_mixture_are_found(spread):
    """However far the experts of tokens differ."""
    truth, model, rng = StepCost(15.0, 0.2, 1, (MIXTURE,), spread), StepCostModel((MIXTURE,)), random.Random(1)
    for _ in range(300):
        tokens = rng.choice((1, 2, 5, 64, 512))
        model.observe(work(tokens), truth.ms(work(tokens)) * rng.uniform(0.98, 1.02))
    assert model.cost().spread == spread
    for tokens in (1, 3, 8, 32, 512):  # 3, 8 and 32 were never measured
        assert model.cost().ms(work(tokens)) == pytest.approx(truth.ms(work(tokens)), rel=0.05)


def test_where_steps_do_not_tell_tokens_differ_as_chance_has_it():
    model = StepCostModel((MIXTURE,))
    for _ in range(100):
        model.observe(work(1), 15.2)
        model.observe(work(512), 180.0)
    assert model.cost().spread == 1.0


@pytest.mark.parametrize("budget_ms", [1.0, 16.0, 40.0, 75.0, 300.0])
def test_as_many_tokens_fit_as_the_costs_of_a_mixture_say(budget_ms):
    cost = StepCost(15.0, 0.2, 1, (MIXTURE,))
    tokens = cost.tokens_within(budget_ms)
    assert cost.ms(work(tokens)) <= budget_ms or tokens == 1
    assert cost.ms(work(tokens + 1)) > budget_ms
