import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from engine.execution.adjust import adjust
from engine.execution.positions import Position
from engine.execution.sampling import NOT_FINITE, _ranked_border, choose, target_probs
from engine.execution.verify import VerifyRow, choose_tokens, verify

from engine.contracts.request import SamplingParams

_spec = importlib.util.spec_from_file_location("sampler_reference", Path(__file__).with_name("sampler_reference.py"))
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)

VOCAB = 40
PROMPT = (1, 2, 3, 3, 7)
OUTPUT = (4, 4, 9, 2)
AT = len(OUTPUT)
HISTORY = torch.tensor(PROMPT + OUTPUT)

SETTINGS = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_k beyond the vocabulary": {"top_k": 1000},
    "top_p": {"top_p": 0.7},
    "tiny top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 0.1},
    "top_k and top_p": {"top_k": 8, "top_p": 0.8, "temperature": 1.3},
    "all filters": {"top_k": 12, "top_p": 0.9, "min_p": 0.05, "temperature": 0.9},
    "bias": {"logit_bias": {3: 2.5, 11: -4.0}},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.8},
    "negative penalties": {"presence_penalty": -0.7, "frequency_penalty": -0.4},
    "repetition": {"repetition_penalty": 1.5},
    "all penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "min_tokens": {"min_tokens": 10},
    "min_tokens reached": {"min_tokens": 4},
    "everything": {
        "logit_bias": {5: 1.0},
        "presence_penalty": 0.5,
        "repetition_penalty": 1.3,
        "min_tokens": 10,
        "temperature": 0.8,
        "top_k": 10,
        "top_p": 0.9,
        "min_p": 0.02,
    },
}


def scripted_logits(rows=1, vocab=VOCAB, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def position(params, seed=0, index=AT, drafts=()):
    return Position(params, seed, index, len(PROMPT), HISTORY, (0, 6), drafts)


def row(params, seed=0, index=AT, **rest):
    return VerifyRow(params, seed, index, len(PROMPT), HISTORY, (0, 6), **rest)


def expected_probs(logits, params):
    x = reference.adjusted(logits.tolist(), params, (PROMPT + OUTPUT), len(PROMPT), len(OUTPUT), (0, 6))
    return reference.distribution(x, params)


@pytest.mark.parametrize("name", SETTINGS)
def test_each_parameter_gives_the_reference_distribution(name):
    params = SamplingParams(**SETTINGS[name])
    logits = scripted_logits(6)
    at = [position(params)] * 6
    got = target_probs(adjust(logits, at), at)
    for i in range(6):
        np.testing.assert_allclose(got[i].numpy(), expected_probs(logits[i], params), atol=2e-6)


def test_a_batch_of_different_requests_gives_each_its_own_distribution():
    all_params = [SamplingParams(**kwargs) for kwargs in SETTINGS.values()]
    logits = scripted_logits(len(all_params), seed=1)
    at = [position(params) for params in all_params]
    got = target_probs(adjust(logits, at), at)
    for i, params in enumerate(all_params):
        np.testing.assert_allclose(got[i].numpy(), expected_probs(logits[i], params), atol=2e-6)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("settings", [{"top_k": 50}, {"top_p": 0.5}, {"top_p": 0.999}, {"top_k": 3000, "top_p": 0.9}])
def test_short_lists_of_a_big_vocabulary_change_nothing(settings, seed):
    params = SamplingParams(**settings)
    logits = scripted_logits(2, vocab=20_000, seed=seed)
    at = [position(params)] * 2
    got = target_probs(adjust(logits, at), at)
    for i in range(2):
        np.testing.assert_allclose(got[i].numpy(), expected_probs(logits[i], params), atol=2e-6)


def test_a_border_found_in_a_short_list_is_the_one_found_by_sorting_everything():
    scaled = scripted_logits(4, vocab=60_000)
    scaled -= scaled.max(-1, keepdim=True).values
    top_k, top_p = torch.tensor([0, 0, 3000, 40_000]), torch.tensor([0.9, 0.2, 0.95, 0.999]).double()
    assert torch.equal(_ranked_border(scaled, top_k, top_p, 1024), _ranked_border(scaled, top_k, top_p, 60_000))


@pytest.mark.parametrize("vocab", [64, 20_000])
def test_tokens_that_tie_with_the_border_are_all_kept(vocab):
    logits = torch.zeros(1, vocab)
    logits[0, :3] = 5.0
    for settings in ({"top_k": 5}, {"top_k": 4, "top_p": 0.9999999}):
        at = [position(SamplingParams(**settings))]
        assert int((target_probs(logits, at) > 0).sum()) == vocab
    at = [position(SamplingParams(top_k=2))]
    assert int((target_probs(logits, at) > 0).sum()) == 3


@pytest.mark.parametrize("name", ["plain", "top_k", "top_p", "all filters", "everything"])
def test_samples_follow_the_reference_distribution(name):
    params = SamplingParams(**SETTINGS[name])
    logits = scripted_logits(1, seed=2)
    n = 20_000
    at = [position(params, seed=1234, index=len(OUTPUT))]
    adjusted = adjust(logits, at).expand(n, -1)
    tokens = choose(adjusted, [position(params, seed=s) for s in range(n)])
    probs = expected_probs(logits[0], params)
    rare = probs < 5 / n
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    assert counts[probs == 0].sum() == 0
    merged_counts = np.append(counts[~rare], counts[rare].sum())
    merged_probs = np.append(probs[~rare], probs[rare].sum())
    bound = len(merged_probs) + 4 * math.sqrt(2 * len(merged_probs))
    assert reference.chi_square(merged_counts, merged_probs) < bound


def test_successive_positions_of_one_seed_are_independent_draws():
    n = 20_000
    logits = torch.tensor([[0.0, 1.0, 2.0, 0.5]]).expand(n, -1)
    tokens = choose(logits, [position(SamplingParams(), seed=77, index=i) for i in range(n)]).numpy()
    probs = torch.softmax(logits[0].double(), -1).numpy()
    pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
    assert reference.chi_square(pairs, np.outer(probs, probs).ravel()) < 45  # 12 degrees of freedom: p ~ 1e-5


def test_greedy_takes_the_lowest_id_among_equals():
    logits = torch.zeros(2, 5000)
    logits[0, [17, 4000]] = 1.0
    logits[1, [4999, 3, 4]] = 1.0
    assert choose(logits, [position(SamplingParams(temperature=0.0))] * 2).tolist() == [17, 3]


def test_a_tiny_temperature_is_almost_greedy_and_overflows_nothing():
    logits = scripted_logits(4) * 100
    tokens = choose(logits, [position(SamplingParams(temperature=1e-30))] * 4)
    assert torch.equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("vocab", [VOCAB, 20_000])
def test_a_sample_does_not_depend_on_its_neighbours(vocab):
    all_params = [SamplingParams(**kwargs) for kwargs in SETTINGS.values()]
    all_params.append(SamplingParams(temperature=0.0))
    logits = scripted_logits(len(all_params), vocab=vocab, seed=3)
    rows = [row(params, seed=i * 991) for i, params in enumerate(all_params)]
    together = choose_tokens(logits, rows).tokens.tolist()
    alone = [int(choose_tokens(logits[i : i + 1], [rows[i]]).tokens) for i in range(len(rows))]
    backwards = choose_tokens(logits.flip(0), rows[::-1]).tokens.tolist()[::-1]
    assert together == alone == backwards


def test_the_logits_handed_in_are_left_alone():
    logits = scripted_logits(len(SETTINGS))
    before = logits.clone()
    verify(logits, [row(SamplingParams(**kwargs, logprobs=2)) for kwargs in SETTINGS.values()])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.5)])
def test_a_broken_row_fails_alone(bad, params):
    logits = scripted_logits(3)
    rows = [row(params, seed=i) for i in range(3)]
    healthy = [v.tokens for v in verify(logits, rows)]
    logits[1, 7] = bad
    verdicts = verify(logits, rows)
    assert "not finite" in verdicts[1].error and verdicts[1].tokens == ()
    assert [verdicts[i].tokens for i in (0, 2)] == [healthy[0], healthy[2]]
    assert verdicts[0].error == verdicts[2].error == ""
    assert choose_tokens(logits, rows).tokens[1] == NOT_FINITE
