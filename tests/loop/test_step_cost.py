import random
from dataclasses import replace

import msgspec
import pytest

from engine.contracts.step_cost import NO_WORK, Mixture, StepCost, StepWork
from engine.loop.step_cost import StepCostModel, StepCostState, usable
from engine.loop.step_errors import StepCostReport


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


TRUTH = StepCost(10.0, 0.3, 1, per_row_ms=1.0, per_decode_context_ms=0.001, per_prefill_context_ms=0.0004)


def some_work(rng):
    decodes = [StepWork.decode(rng.randint(1, 3000)) for _ in range(rng.randint(0, 4))]
    chunks = [StepWork.chunk(rng.randint(1, 256), rng.randint(0, 2000))] if not decodes or rng.random() < 0.5 else []
    return sum([*decodes, *chunks], NO_WORK)


def fed(steps=400, seed=0):
    model, rng = StepCostModel(), random.Random(seed)
    for _ in range(steps):
        each = some_work(rng)
        model.observe(each, TRUTH.ms(each) * rng.uniform(0.97, 1.03), rng.uniform(0.1, 0.3))
    return model


def test_what_tokens_of_context_cost_is_found():
    cost, rng = fed().cost(), random.Random(1)
    for each in (some_work(rng) for _ in range(20)):
        assert cost.ms(each) == pytest.approx(TRUTH.ms(each), rel=0.05)
    assert cost.gap_ms == pytest.approx(0.2, abs=0.06)


def test_what_prompts_cost_is_not_forgotten_while_the_same_requests_decode():
    model, rng = fed(), random.Random(2)
    for i in range(1500):
        each = StepWork(4, 4, 2000 + 4 * i)
        model.observe(each, TRUTH.ms(each) * rng.uniform(0.97, 1.03))
    mixed = StepWork.decode(500) + StepWork.chunk(256, 1000)
    assert model.cost().ms(mixed) == pytest.approx(TRUTH.ms(mixed), rel=0.1)


def test_long_prompts_are_foretold_from_short_ones_where_a_row_that_decodes_costs_more_than_a_prompt_token():
    truth, rng = StepCost(1.3, 0.05, 1, per_row_ms=0.15, per_prefill_context_ms=2e-5), random.Random(6)
    model, without_rows = StepCostModel(), StepCostModel()
    for step in range(2000):
        decodes = [StepWork.decode(rng.randint(100, 400)) for _ in range(rng.randint(1, 8))]
        chunks = [StepWork.chunk(rng.randint(16, 400))] if step % 10 == 0 else []
        each = sum([*decodes, *chunks], NO_WORK)
        ms = truth.ms(each) * rng.uniform(0.95, 1.05)
        model.observe(each, ms)
        without_rows.observe(replace(each, num_rows=0), ms)
    long = StepWork.chunk(1500)
    assert model.state().cost.ms(long) == pytest.approx(truth.ms(long), rel=0.1)
    assert without_rows.state().cost.ms(long) < 0.85 * truth.ms(long)


def test_work_beyond_what_was_measured_is_flagged_and_not_clipped():
    cost = fed().cost()
    assert not cost.extrapolates(StepWork.decode(500))
    for beyond in (StepWork(100, 100, 1000), StepWork.decode(10**6), StepWork.chunk(200, 10**5), StepWork(1, 5000)):
        assert cost.extrapolates(beyond)
        assert cost.ms(beyond) == pytest.approx(TRUTH.ms(beyond), rel=0.15)


@pytest.mark.parametrize("mixtures", [(), (MIXTURE,)])
@pytest.mark.parametrize("context", [0, 3000])
def test_the_largest_chunk_in_time_is_found_beside_decodes_and_at_its_context(context, mixtures):
    cost = replace(TRUTH, mixtures=mixtures, gap_ms=0.5)
    beside = StepWork.decode(2000) + StepWork.decode(100)
    for budget_ms in (40.0, 150.0, 900.0):
        count = cost.tokens_within(budget_ms, beside, context)
        within, beyond = (cost.gap_ms + cost.ms(beside + StepWork.chunk(n, context)) for n in (count, count + 1))
        assert (within <= budget_ms or count == 1) and beyond > budget_ms


def test_costs_survive_json():
    cost = fed().cost()
    assert msgspec.json.decode(msgspec.json.encode(cost), type=StepCost) == cost


def test_another_process_goes_on_from_what_was_measured():
    first = fed()
    second = StepCostModel(state=msgspec.json.decode(msgspec.json.encode(first.state()), type=StepCostState))
    assert second.cost() == first.state().cost and second.cost().num_samples == first.cost().num_samples
    each = StepWork.decode(700) + StepWork.chunk(64, 400)
    for model in (first, second):
        model.observe(each, TRUTH.ms(each))
    assert second.cost().ms(each) == pytest.approx(first.cost().ms(each), rel=0.02)


def test_errors_are_reported_by_kind_of_step():
    model = StepCostModel()
    kinds = {"decode": StepWork.decode(100), "prefill": StepWork.chunk(64), "mixed": NO_WORK}
    kinds["mixed"] = kinds["decode"] + kinds["prefill"]
    for i in range(300):
        each = list(kinds.values())[i % 3]
        model.observe(each, TRUTH.ms(each))
    report = model.report()
    assert report.cost == model.cost()
    assert {of.kind for of in report.errors} == kinds.keys()
    assert all(of.median_error < 0.01 and abs(of.bias) < 0.01 and of.num_steps == 100 for of in report.errors[1:])


def test_what_is_handed_on_remembers_what_came_before_the_last_steps():
    model = StepCostModel()
    rng = random.Random(4)
    for _ in range(100):
        for work in (StepWork.chunk(rng.randint(16, 512)), StepWork.decode(rng.randint(1, 900))):
            model.observe(work, (10.0 + 0.5 * work.num_tokens) * rng.uniform(0.9, 1.1))
    for _ in range(600):  # with decodes alone, and a machine that has become slower
        work = StepWork.decode(rng.randint(1, 900))
        model.observe(work, 14.0 * rng.uniform(0.9, 1.1))
    handed_on = model.state().cost
    assert model.cost().ms(StepWork.decode(400)) == pytest.approx(14.0, rel=0.05)
    assert handed_on.ms(StepWork.decode(400)) == pytest.approx(13.0, rel=0.1)
    assert handed_on.ms(StepWork.chunk(256)) == pytest.approx(138.0, rel=0.1)


def test_a_noisy_time_is_foretold_by_its_mean():
    model = StepCostModel()
    rng = random.Random(5)
    times = [12.0 * rng.choice((0.7, 0.9, 1.1, 1.3)) for _ in range(3000)]
    for ms in times:
        model.observe(StepWork.decode(rng.randint(1, 900)), ms)
    assert model.state().cost.ms(StepWork.decode(400)) == pytest.approx(12.0, rel=0.02)


def test_the_errors_are_handed_on_and_told_in_words():
    model = StepCostModel()
    rng = random.Random(6)
    assert StepCostReport(model.cost()).words == ""
    for _ in range(300):
        model.observe(StepWork.decode(100), 12.0 * rng.choice((0.8, 1.2)))
    state = model.state()
    assert [error.kind for error in state.errors] == ["decode"] and usable(state, ()) is None
    assert state.errors[0].median_error == pytest.approx(0.2, abs=0.1)
    assert "decode steps 19%" in StepCostReport(state.cost, state.errors).words
    assert not StepCostModel((), state).report().errors  # its own predictions are still to come
