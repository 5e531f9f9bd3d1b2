"""What drafting costs and what becomes of drafts, as measured from steps."""

import random

import msgspec
import pytest

from engine.contracts.step_cost import DraftCost, StepCost, StepWork
from engine.loop.draft_cost import DraftCostModel, DraftFit, DraftSample, unusable_fit
from engine.loop.least_squares import solved
from engine.loop.step_cost import StepCostModel

TRUTH = DraftCost(0.4, 0.01, 0.2, 0.05)
CHANCES = (0.7, 0.4)


def sample(rng: random.Random) -> DraftSample:
    rows, width = rng.randint(1, 8), rng.randint(0, 2)
    tokens = rows * (1 + width) + rng.choice((0, 0, 300))
    ms = TRUTH.ms(tokens, width, rows * width) * rng.uniform(0.5, 1.5)
    chains = sum(rng.random() < 0.8 for _ in range(rows)) if width else 0
    tried, accepted, reached = [], [], chains
    for chance in CHANCES[:width]:
        tried.append(reached)
        reached = sum(rng.random() < chance for _ in range(reached))
        accepted.append(reached)
    return DraftSample(ms, tokens, (width,) * rows, rows if width else 0, chains, tried, accepted)


def test_costs_and_acceptance_are_found_and_survive_a_restart() -> None:
    rng, model = random.Random(3), DraftCostModel()
    assert model.cost() is None and model.fit() is None
    for _ in range(1500):
        model.observe(sample(rng))
    kept = msgspec.json.decode(msgspec.json.encode(model.fit()), type=DraftFit)
    again = DraftCostModel(kept)
    found = again.cost()
    assert found is not None and found == model.cost()
    for work in ((8, 2, 16), (320, 1, 8), (4, 0, 0)):
        assert found.ms(*work) == pytest.approx(TRUTH.ms(*work), rel=0.1)
    assert found.acceptance == pytest.approx(CHANCES, abs=0.05) and found.proposes == pytest.approx(0.8, abs=0.05)
    assert unusable_fit(kept) is None
    assert unusable_fit(msgspec.structs.replace(kept, sums=kept.sums[1:])) is not None


def test_no_coefficient_is_below_zero() -> None:
    """Of ``2 a = 4`` and ``b = -3``."""
    assert solved([[4.0, 0.0, 8.0], [0.0, 1.0, -3.0]], [0.0, 0.0]) == [2.0, 0.0]


def test_verified_drafts_cost_other_than_tokens_of_a_prompt() -> None:
    truth = StepCost(1.0, 0.06, 1, per_row_ms=0.1, largest=StepWork(num_drafts=6), per_draft_ms=0.15)
    rng, model = random.Random(5), StepCostModel()
    for _ in range(600):
        work = StepWork()
        for _ in range(rng.randint(1, 8)):
            work += StepWork.decode(rng.randint(50, 500), rng.choice((1, 1, 4, 7)))
        work += StepWork.chunk(rng.randint(20, 300)) if rng.random() < 0.3 else StepWork()
        model.observe(work, truth.ms(work) * rng.uniform(0.95, 1.05))
    found = model.state().cost
    assert (found.per_token_ms, found.per_draft_ms) == pytest.approx((0.06, 0.15), rel=0.1)
    undrafted = StepCost(1.0, 0.06, 1)
    assert undrafted.ms(StepWork.decode(10, 4)) == pytest.approx(1.0 + 4 * 0.06)


def test_what_is_handed_on_has_the_mean_gap() -> None:
    model = StepCostModel()
    for number in range(1000):
        model.observe(StepWork.decode(10), 5.0, 2.0 if number % 5 == 0 else 0.1)
    assert model.state().cost.gap_ms == pytest.approx(0.48, rel=0.1)
    assert model.cost().gap_ms < 0.3
