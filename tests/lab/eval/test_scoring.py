"""Perplexity and KL are what their definitions say, and a plan that breaks is not scored."""

import math

import pytest
import torch

from engine_lab.eval.scoring import BrokenLogits, Score, add, log_probabilities


def test_sums_follow_the_definitions():
    torch.manual_seed(0)
    reference, logits = torch.randn(7, 11), torch.randn(7, 11)
    targets = torch.arange(7)
    score = Score()
    for rows in (slice(0, 3), slice(3, 7)):
        add(score, log_probabilities(reference[rows]), log_probabilities(logits[rows]), targets[rows])
    p, q = reference.double().softmax(1), logits.double().softmax(1)
    assert score.tokens == 7
    assert score.perplexity == pytest.approx(math.exp(-q[torch.arange(7), targets].log().mean()), rel=1e-6)
    assert score.mean_kl == pytest.approx(float((p * (p / q).log()).sum(1).mean()), rel=1e-5)
    assert score.agreement == float((p.argmax(1) == q.argmax(1)).float().mean())


def test_a_token_the_reference_rules_out_adds_nothing():
    reference = torch.tensor([[0.0, -math.inf]])
    score = Score()
    add(score, log_probabilities(reference), log_probabilities(torch.tensor([[0.0, 0.0]])), torch.tensor([0]))
    assert score.mean_kl == pytest.approx(math.log(2))


def test_a_probability_too_small_for_a_float_adds_nothing_even_where_the_plan_rules_the_token_out():
    reference, plan = torch.tensor([[0.0, -200.0]]), torch.tensor([[0.0, -math.inf]])
    score = Score()
    add(score, log_probabilities(reference), log_probabilities(plan), torch.tensor([0]))
    assert score.mean_kl == 0.0


def test_a_token_that_the_plan_alone_rules_out_is_infinitely_far():
    score = Score()
    plan = torch.tensor([[0.0, -math.inf]])
    add(score, log_probabilities(torch.tensor([[0.0, 0.0]])), log_probabilities(plan), torch.tensor([1]))
    assert score.mean_kl == math.inf and score.perplexity == math.inf


def test_a_perplexity_that_no_float_holds_is_infinite():
    assert Score(tokens=1, nll=1e4).perplexity == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_numbers_stop_the_evaluation(value):
    with pytest.raises(BrokenLogits, match="dtype"):
        log_probabilities(torch.tensor([[0.0, value]]))
