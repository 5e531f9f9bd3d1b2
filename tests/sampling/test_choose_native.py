"""Drafts chosen by C++ are those that :func:`engine.sampling.choose.choose` chooses."""

import torch

from engine.contracts.request import SamplingParams
from engine.sampling.choose import choose
from engine.sampling.choose_native import Columns, chosen
from engine.sampling.state import Feature, SamplingState
from tests.native import needs_compiler

pytestmark = needs_compiler

SETTINGS = (
    {"temperature": 0.0}, {}, {"temperature": 0.3}, {"temperature": 1.7}, {"top_k": 5}, {"top_k": 1}, {"top_k": 10**6},
    {"top_p": 0.7}, {"top_p": 1e-6}, {"min_p": 0.1}, {"top_k": 8, "top_p": 0.8},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
)  # fmt: skip


def both(vocab, ids=None, offset=0, scale=3.0, seed=0):
    """Tokens by C++ and by torch, one row for each setting, with four seeds."""
    params = [SamplingParams(**kwargs) for kwargs in SETTINGS] * 4
    state = SamplingState(len(params) + 1, "cpu")
    for row, found in enumerate(params):
        state.write(row, found, seed=row * 7919 - 3 * 2**40, prompt_len=5 + row, stop_ids=())
    rows = torch.arange(len(params)).flip(0)
    positions = rows * 3 + 10
    logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(seed)) * scale
    out, columns = torch.zeros(len(params), dtype=torch.int64), Columns(*state.addresses())
    chosen(columns, rows, positions, offset, logits, ids, out)()
    batch = state.at(rows, positions + offset, Feature.SAMPLED | Feature.FILTERED)
    return out, choose(logits, batch, ids)


def test_every_setting_chooses_the_same_token():
    for vocab in (40, 5000):
        for seed in range(4):
            got, want = both(vocab, seed=seed)
            assert torch.equal(got, want), (vocab, seed)


def test_the_position_may_be_further_on():
    (got, want), (here, _) = both(40, offset=1), both(40)
    assert torch.equal(got, want) and not torch.equal(got, here)


def test_columns_that_stand_for_other_tokens_have_their_noise_and_their_names():
    ids = torch.randperm(9000, generator=torch.Generator().manual_seed(1))[:300]
    got, want = both(300, ids=ids)
    assert torch.equal(got, want) and set(got.tolist()) <= set(ids.tolist())


def test_equal_logits_are_all_kept_and_the_first_is_the_greedy_one():
    got, want = both(64, scale=0.0)
    assert torch.equal(got, want)


def test_logits_that_are_not_finite_choose_some_token():
    state = SamplingState(1, "cpu")
    state.write(0, SamplingParams(), 1, 1, ())
    out, zero = torch.full((1,), -7), torch.zeros(1, dtype=torch.int64)
    for broken in (float("nan"), float("inf")):
        logits = torch.zeros(1, 30)
        logits[0, 7] = broken
        columns = Columns(*state.addresses())
        chosen(columns, zero, zero, 0, logits, None, out)()
        assert 0 <= int(out) < 30
