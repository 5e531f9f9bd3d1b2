"""More than 100,000 drafted tokens per case through the engine's own verification: a chi-square test cannot tell their
distribution from the target's, and would see one that is off by a total variation of 0.02."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.contracts.request import SamplingParams
from engine.sampling.choose import choose
from engine.sampling.state import SamplingBatch, SamplingState, features_of
from engine.sampling.verify import accepted_of, choose_tokens
from tests.selection import few

from . import reference

VOCAB, SEQUENCES, NUM_DRAFTS, NUM_TOKENS = 32, 1000, 3, 100_000
BIAS = 0.02
PARAMS = {
    "temperature 1": SamplingParams(temperature=1.0),
    "top-p 0.9": SamplingParams(temperature=1.0, top_p=0.9),
    "top-k 20": SamplingParams(temperature=1.0, top_k=20),
}
LOGITS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(8))
"""The target: logits of the next token by the last one."""


@cache
def wanted(name: str) -> np.ndarray:
    """The target's distribution of the next token by the last one, ``[VOCAB, VOCAB]``."""
    return np.stack([reference.distribution(row.double().numpy(), PARAMS[name]) for row in LOGITS])


def biased(name: str) -> Tensor:
    """Logits of a distribution at a total variation of :data:`BIAS` from the target's, after every token."""
    probs = wanted(name).copy()
    best, second = np.argsort(-probs, axis=1)[:, :2].T
    rows = np.arange(VOCAB)
    probs[rows, best] -= BIAS
    probs[rows, second] += BIAS
    assert np.allclose(0.5 * np.abs(probs - wanted(name)).sum(axis=1), BIAS)
    return torch.from_numpy(probs).log().float()


Drafter = Callable[[Tensor, SamplingBatch, torch.Generator], Tensor]
"""The draft after each of tokens ``[SEQUENCES]``, given the parameters and so the noise of its position."""


def with_the_targets_noise(last: Tensor, batch: SamplingBatch, generator: torch.Generator) -> Tensor:
    """Draws from a distribution that is neither the target's nor far from it."""
    return choose(0.7 * LOGITS[last] + 0.3 * LOGITS[last].roll(1, -1), batch)


def likely_or_guessed(last: Tensor, batch: SamplingBatch, generator: torch.Generator) -> Tensor:
    """The most likely tokens, and some that are just guessed."""
    guess = torch.randint(VOCAB, last.shape, generator=generator)
    sure = torch.rand(last.shape, generator=generator) < 0.8
    return torch.where(sure, LOGITS[last].argmax(-1), guess)


DRAFTERS: dict[str, Drafter] = {"shared noise": with_the_targets_noise, "likely": likely_or_guessed}


def followers(logits: Tensor, params: SamplingParams, drafter: Drafter) -> np.ndarray:
    """How often which token followed which, ``[VOCAB, VOCAB]``, in :data:`NUM_TOKENS` tokens or a few more of
    :data:`SEQUENCES` texts; every number of drafts was accepted somewhere."""
    generator = torch.Generator().manual_seed(17)
    state, features = SamplingState(SEQUENCES, "cpu"), features_of(params)
    for row in range(SEQUENCES):
        state.write(row, params, 7919 * row + 1, 1, ())
    every, offsets = torch.arange(SEQUENCES), torch.arange(NUM_DRAFTS + 1)
    rows, no_text = every.repeat_interleave(NUM_DRAFTS + 1), torch.empty(0, dtype=torch.int64)
    last, lengths = every % VOCAB, torch.zeros(SEQUENCES, dtype=torch.int64)
    counts, seen = np.zeros((VOCAB, VOCAB), dtype=np.int64), set[int]()
    while counts.sum() < NUM_TOKENS:
        inputs = [last]
        for j in range(NUM_DRAFTS):
            inputs.append(drafter(inputs[-1], state.at(every, lengths + j, features), generator))
        flat = torch.stack(inputs, 1).flatten()
        batch = state.at(rows, (lengths[:, None] + offsets).flatten(), features)
        tokens, _ = choose_tokens(logits[flat], batch, state, no_text, 0)
        accepted = accepted_of(flat, tokens, (NUM_DRAFTS,) * SEQUENCES)
        output = tokens.view(SEQUENCES, -1)
        kept = offsets <= accepted[:, None]
        np.add.at(counts, (flat.view(SEQUENCES, -1)[kept].numpy(), output[kept].numpy()), 1)
        seen |= set(accepted.tolist())
        last = output.gather(1, accepted[:, None])[:, 0]
        lengths = lengths + accepted + 1
    assert seen == set(range(NUM_DRAFTS + 1))
    return counts


def p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """Of Pearson's chi-square test that every row of ``counts`` was drawn from that row of ``probs``. Cells that
    expect less than five are taken together, row by row."""
    statistic, freedom = 0.0, 0
    for row, distribution in zip(counts, probs, strict=True):
        rare = distribution * row.sum() < 5
        cells = np.append(row[~rare], row[rare].sum())
        chances = np.append(distribution[~rare], distribution[rare].sum())
        statistic += reference.chi_square(cells, chances)
        freedom += int((chances > 0).sum()) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), torch.tensor(statistic / 2)))


@few(2)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", PARAMS)
def test_drafted_tokens_follow_the_targets_distribution(name: str, drafter: str) -> None:
    counts = followers(LOGITS, PARAMS[name], DRAFTERS[drafter])
    assert counts.sum() >= NUM_TOKENS
    assert p_value(counts, wanted(name)) > 1e-2


@few(1)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", PARAMS)
def test_the_test_sees_a_bias_of_two_percent(name: str, drafter: str) -> None:
    counts = followers(biased(name), SamplingParams(temperature=1.0), DRAFTERS[drafter])
    kept = np.where(wanted(name) > 0, counts, 0)
    assert (kept == counts).all()
    assert p_value(counts, wanted(name)) < 1e-3


def test_the_test_is_fair_to_the_target_itself() -> None:
    """Drawn from the target by numpy, its p-values are spread evenly over 0 to 1."""
    rng = np.random.default_rng(4)
    probs = wanted("temperature 1")
    values = [p_value(np.stack([rng.multinomial(3000, row / row.sum()) for row in probs]), probs) for _ in range(200)]
    assert 60 <= sum(value < 0.5 for value in values) <= 140
    assert sum(value < 0.01 for value in values) <= 10
