"""More than 100,000 drafted tokens per case through the engine's own verification: a chi-square test cannot tell their
distribution from the target's, and would see one that is off by a total variation of 0.02."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from engine.execution.verify import VerifyRow, verify
from torch import Tensor

from engine.contracts.request import SamplingParams

from . import sampler_reference as reference

VOCAB, SEQUENCES, WIDTH, NUM_TOKENS = 32, 1000, 3, 100_000
BIAS = 0.02
NO_HISTORY = torch.empty(0, dtype=torch.int64)
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
    """Logits of a distribution at a total variation of :data:`BIAS` from the target's, behind every token."""
    probs = wanted(name).copy()
    best, second = np.argsort(-probs, axis=1)[:, :2].T
    rows = np.arange(VOCAB)
    probs[rows, best] -= BIAS
    probs[rows, second] += BIAS
    assert np.allclose(0.5 * np.abs(probs - wanted(name)).sum(axis=1), BIAS)
    return torch.from_numpy(probs).log().float()


class SamplingDrafter:
    """Samples from a distribution that is neither the target's nor far from it, and says so."""

    def propose(self, last: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """Drafts ``[N, WIDTH]`` and their probabilities ``[N, WIDTH, VOCAB]``."""
        drafts, probs = [], []
        for step in range(WIDTH):
            q = torch.softmax(0.7 * LOGITS[last] + 0.3 * LOGITS[last].roll(step + 1, -1), -1)
            last = torch.multinomial(q, 1, generator=generator)[:, 0]
            drafts.append(last)
            probs.append(q)
        return torch.stack(drafts, 1), torch.stack(probs, 1)


class CertainDrafter:
    """The likeliest tokens, and some that are just guessed."""

    def propose(self, last: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        drafts = []
        for _ in range(WIDTH):
            guess = torch.randint(VOCAB, last.shape, generator=generator)
            sure = torch.rand(last.shape, generator=generator) < 0.8
            last = torch.where(sure, LOGITS[last].argmax(-1), guess)
            drafts.append(last)
        return torch.stack(drafts, 1), None


DRAFTERS = {"sampled": SamplingDrafter(), "certain": CertainDrafter()}


def followers(logits: Tensor, params: SamplingParams, drafter: SamplingDrafter | CertainDrafter) -> np.ndarray:
    """How often which token followed which, ``[VOCAB, VOCAB]``, in :data:`NUM_TOKENS` tokens or a few more of
    :data:`SEQUENCES` texts; every number of drafts stood somewhere."""
    generator = torch.Generator().manual_seed(17)
    last = torch.arange(SEQUENCES) % VOCAB
    lengths = [0] * SEQUENCES
    counts, stood = np.zeros((VOCAB, VOCAB), dtype=np.int64), set[int]()
    while counts.sum() < NUM_TOKENS:
        drafts, probs = drafter.propose(last, generator)
        listed = drafts.tolist()
        q = [None] * SEQUENCES if probs is None else list(probs)
        rows = [
            VerifyRow(params, 7919 * i + 1, lengths[i], 1, NO_HISTORY, (), tuple(listed[i]), q[i])
            for i in range(SEQUENCES)
        ]
        verdicts = verify(logits[torch.cat((last[:, None], drafts), 1).flatten()], rows)
        before, after = [], []
        for i, (first, verdict) in enumerate(zip(last.tolist(), verdicts, strict=True)):
            before += [first, *verdict.tokens[:-1]]
            after += verdict.tokens
            lengths[i] += len(verdict.tokens)
            stood.add(verdict.num_accepted)
        np.add.at(counts, (before, after), 1)
        last = torch.tensor([verdict.tokens[-1] for verdict in verdicts])
    assert stood == set(range(WIDTH + 1))
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


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", PARAMS)
def test_drafted_tokens_follow_the_targets_distribution(name: str, drafter: str) -> None:
    counts = followers(LOGITS, PARAMS[name], DRAFTERS[drafter])
    assert counts.sum() >= NUM_TOKENS
    assert p_value(counts, wanted(name)) > 1e-2


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
