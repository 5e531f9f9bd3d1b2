import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.contracts.request import SamplingParams
from engine.kernels.torch.reference import NOT_FINITE
from engine.sampling.choose import _ranked_border, choose

from . import reference
from .requests import Request, Tables, batch_of, choose_tokens_of, many_draws, target_probs, verify

VOCAB = 40
PROMPT = (1, 2, 3, 3, 7)
OUTPUT = (4, 4, 9, 2)
AT = len(OUTPUT)
STOPS = (0, 6)

SETTINGS = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_k of one": {"top_k": 1},
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
ALL_PARAMS = [SamplingParams(**kwargs) for kwargs in SETTINGS.values()]


def random_logits(rows=1, vocab=VOCAB, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def request(params, seed=0):
    return Request(params, seed, PROMPT + OUTPUT, len(PROMPT), STOPS)


def probs_of(logits, params):
    """What each request's token is drawn from, ``[N, V]``."""
    tables = Tables.of([request(p) for p in params])
    return target_probs(tables.choose(logits)[1], tables.batch).numpy()


def expected_probs(logits, params):
    x = reference.adjusted(logits.tolist(), params, (PROMPT + OUTPUT), len(PROMPT), len(OUTPUT), STOPS)
    return reference.distribution(x, params)


@pytest.mark.parametrize("name", SETTINGS)
def test_each_parameter_gives_the_reference_distribution(name):
    params = SamplingParams(**SETTINGS[name])
    logits = random_logits(6)
    got = probs_of(logits, [params] * 6)
    for i in range(6):
        np.testing.assert_allclose(got[i], expected_probs(logits[i], params), atol=2e-6)


def test_a_batch_of_different_requests_gives_each_its_own_distribution():
    logits = random_logits(len(ALL_PARAMS), seed=1)
    got = probs_of(logits, ALL_PARAMS)
    for i, params in enumerate(ALL_PARAMS):
        np.testing.assert_allclose(got[i], expected_probs(logits[i], params), atol=2e-6)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("settings", [{"top_k": 50}, {"top_p": 0.5}, {"top_p": 0.999}, {"top_k": 3000, "top_p": 0.9}])
def test_short_lists_of_a_big_vocabulary_change_nothing(settings, seed):
    params = SamplingParams(**settings)
    logits = random_logits(2, vocab=20_000, seed=seed)
    got = probs_of(logits, [params] * 2)
    for i in range(2):
        np.testing.assert_allclose(got[i], expected_probs(logits[i], params), atol=2e-6)


def test_a_border_found_in_a_short_list_is_the_one_found_by_sorting_everything():
    scaled = random_logits(4, vocab=60_000)
    scaled -= scaled.max(-1, keepdim=True).values
    top_k, top_p = torch.tensor([0, 0, 3000, 40_000]), torch.tensor([0.9, 0.2, 0.95, 0.999]).double()
    assert torch.equal(_ranked_border(scaled, top_k, top_p, 1024), _ranked_border(scaled, top_k, top_p, 60_000))


@pytest.mark.parametrize("vocab", [64, 20_000])
@pytest.mark.parametrize(
    ("settings", "kept"), [({"top_k": 5}, None), ({"top_k": 4, "top_p": 0.9999999}, None), ({"top_k": 2}, 3)]
)
def test_tokens_that_tie_with_the_border_are_all_kept(vocab, settings, kept):
    logits = torch.zeros(1, vocab)
    logits[0, :3] = 5.0
    probs = target_probs(logits, batch_of([SamplingParams(**settings)], [0], [0]))
    assert int((probs > 0).sum()) == (kept or vocab)


@pytest.mark.parametrize("name", ["plain", "top_k", "top_p", "all filters", "everything"])
def test_samples_follow_the_reference_distribution(name):
    params = SamplingParams(**SETTINGS[name])
    logits = random_logits(1, seed=2)
    n = 20_000
    adjusted = Tables.of([request(params)]).choose(logits)[1].expand(n, -1)
    tokens = choose(adjusted, many_draws(params, torch.arange(n), torch.full((n,), AT)))
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
    tokens = choose(logits, many_draws(SamplingParams(), torch.full((n,), 77), torch.arange(n))).numpy()
    probs = torch.softmax(logits[0].double(), -1).numpy()
    pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
    assert reference.chi_square(pairs, np.outer(probs, probs).ravel()) < 45  # 12 degrees of freedom: p ~ 1e-5


def test_greedy_takes_the_lowest_id_among_equals():
    logits = torch.zeros(2, 5000)
    logits[0, [17, 4000]] = 1.0
    logits[1, [4999, 3, 4]] = 1.0
    assert choose(logits, batch_of([SamplingParams(temperature=0.0)] * 2, [0, 0], [0, 0])).tolist() == [17, 3]


def test_a_tiny_temperature_is_almost_greedy_and_overflows_nothing():
    logits = random_logits(4) * 100
    tokens = choose(logits, batch_of([SamplingParams(temperature=1e-30)] * 4, range(4), [AT] * 4))
    assert torch.equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("vocab", [VOCAB, 20_000])
def test_a_sample_does_not_depend_on_its_neighbours(vocab):
    all_params = [*ALL_PARAMS, SamplingParams(temperature=0.0)]
    logits = random_logits(len(all_params), vocab=vocab, seed=3)
    rows = [request(params, seed=i * 991) for i, params in enumerate(all_params)]
    together = choose_tokens_of(logits, rows).tolist()
    alone = [int(choose_tokens_of(logits[i : i + 1], [rows[i]])) for i in range(len(rows))]
    backwards = choose_tokens_of(logits.flip(0), rows[::-1]).tolist()[::-1]
    assert together == alone == backwards


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.5)])
def test_a_broken_row_fails_alone(bad, params):
    logits = random_logits(3)
    rows = [request(params, seed=i) for i in range(3)]
    healthy = [v.tokens for v in verify(logits, rows)]
    logits[1, 7] = bad
    verdicts = verify(logits, rows)
    assert "not finite" in verdicts[1].error and verdicts[1].tokens == ()
    assert [verdicts[i].tokens for i in (0, 2)] == [healthy[0], healthy[2]]
    assert verdicts[0].error == verdicts[2].error == ""
    assert choose_tokens_of(logits, rows)[1] == NOT_FINITE


IDS_PARAMS = [
    SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=7), SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.1, temperature=1.5), SamplingParams(top_k=20, top_p=0.9, min_p=0.01),
] * 3  # fmt: skip


@pytest.mark.parametrize("params", [IDS_PARAMS, [SamplingParams()] * 5], ids=["mixed", "unfiltered"])
def test_columns_that_stand_for_tokens_are_chosen_as_among_all_tokens(params):
    """The same as if the others had a logit of -inf: noise and result are those of the tokens."""
    ids = torch.randperm(3000, generator=torch.Generator().manual_seed(4))[:200]
    logits = random_logits(len(params), vocab=200, seed=5)
    batch = batch_of(params, range(len(params)), range(len(params)))
    among_all = torch.full((len(params), 3000), -math.inf)
    among_all[:, ids] = logits
    before = logits.clone()
    assert torch.equal(choose(logits, batch, ids), choose(among_all, batch))
    assert not torch.equal(choose(logits, batch, ids), ids[choose(logits, batch)])
    assert torch.equal(logits, before), "logits are only read"


def test_broken_rows_have_no_token_where_columns_stand_for_tokens_either():
    logits = random_logits(3)
    logits[1, 0] = math.nan
    batch = batch_of([SamplingParams(), SamplingParams(), SamplingParams(temperature=0.0)], [1, 2, 3], [0, 0, 0])
    ids = torch.arange(VOCAB) + 7
    assert (choose(logits, batch, ids) == NOT_FINITE).tolist() == [False, True, False]
    assert choose(logits, replace(batch, temperature=torch.zeros(3)), ids)[2] == 7 + logits[2].argmax()
