import importlib.util
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from engine.execution.verify import VerifyRow, verify

from engine.contracts.request import SamplingParams

_spec = importlib.util.spec_from_file_location("sampler_reference", Path(__file__).with_name("sampler_reference.py"))
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)

VOCAB = 8
DRAWS = 20_000
GREEDY = SamplingParams(temperature=0.0)


class ToyModel:
    """Logits that depend on the last two tokens: enough for a chain to matter."""

    def __init__(self, vocab=VOCAB, seed=0):
        self.vocab = vocab
        self.table = torch.randn(vocab, vocab, vocab, generator=torch.Generator().manual_seed(seed)) * 2

    def logits(self, tokens):
        return self.table[tokens[-2], tokens[-1]]

    def run(self, tokens, drafts):
        """``[1 + len(drafts), V]``: what one verification pass computes."""
        return torch.stack([self.logits([*tokens, *drafts[:j]]) for j in range(len(drafts) + 1)])


def generate(model, params, prompt, count, propose, seed=0):
    """Tokens produced step by step with ``propose(tokens) -> drafts``."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < count:
        drafts = tuple(propose(tokens))
        row = VerifyRow(params, seed, len(tokens) - len(prompt), len(prompt), torch.tensor(tokens), (0,), drafts=drafts)
        tokens += verify(model.run(tokens, drafts), [row])[0].tokens
    return tokens[len(prompt) : len(prompt) + count]


def guesses(model, seed):
    """Proposals of varying length that are sometimes right."""
    rng = np.random.default_rng(seed)

    def propose(tokens):
        drafts, known = [], list(tokens)
        for _ in range(rng.integers(0, 5)):
            right = int(model.logits(known).argmax())
            drafts.append(right if rng.random() < 0.7 else int(rng.integers(model.vocab)))
            known.append(drafts[-1])
        return drafts

    return propose


ANY_WIDTH = {
    "greedy": GREEDY,
    "seeded": SamplingParams(seed=5, temperature=0.8),
    "unseeded": SamplingParams(temperature=0.8),
    "seeded, filtered": SamplingParams(seed=5, top_k=4, top_p=0.9),
    "greedy, penalised": SamplingParams(
        temperature=0.0, presence_penalty=0.7, frequency_penalty=0.5, repetition_penalty=1.3
    ),
    "seeded, penalised": SamplingParams(seed=5, frequency_penalty=0.6, repetition_penalty=1.2),
    "greedy, long enough": SamplingParams(temperature=0.0, min_tokens=25, logit_bias={0: 3.0}),
}


@pytest.mark.parametrize("name", ANY_WIDTH)
def test_drafts_never_change_the_tokens(name):
    params, model = ANY_WIDTH[name], ToyModel()
    plain = generate(model, params, (1, 2), 40, lambda tokens: ())
    for seed in range(3):
        assert generate(model, params, (1, 2), 40, guesses(model, seed)) == plain


def test_greedy_rows_accept_exactly_the_matching_prefix():
    model, tokens = ToyModel(), [1, 2]
    right = generate(model, GREEDY, tokens, 4, lambda _: ())
    wrong = (right[2] + 1) % VOCAB
    for drafts, accepted in [(right[:3], 3), ([right[0], right[1], wrong], 2), ([wrong, *right[:2]], 0)]:
        if accepted == 0 and wrong == right[0]:
            continue
        row = VerifyRow(GREEDY, 0, 0, 2, torch.tensor(tokens), (), drafts=tuple(drafts))
        (verdict,) = verify(model.run(tokens, drafts), [row])
        assert verdict.num_accepted == accepted
        assert list(verdict.tokens) == right[: accepted + 1]


def test_a_batch_of_all_kinds_gives_each_row_what_it_gets_alone():
    model, tokens = ToyModel(), [1, 2]
    history = torch.tensor(tokens)
    q = torch.softmax(model.run(tokens, (3, 4)) * 0.5, -1)
    rows = [
        VerifyRow(params, i, 0, 2, history, (), drafts, probs)
        for i, (params, drafts, probs) in enumerate(
            [
                (GREEDY, (3,), None),
                (SamplingParams(), (3, 4), q),
                (SamplingParams(seed=1, logprobs=2), (3, 4), q),
                (SamplingParams(), (), None),
                (SamplingParams(logprobs=1), (5, 6, 1), torch.full((3, VOCAB), 1 / VOCAB)),
                (SamplingParams(temperature=0.0, presence_penalty=1.0), (2, 2), q),
            ]
        )
    ]
    parts = [model.run(tokens, row.drafts) for row in rows]
    together = verify(torch.cat(parts), rows)
    alone = [verify(part, [row])[0] for part, row in zip(parts, rows)]
    for i in range(len(rows)):
        assert together[i].tokens == alone[i].tokens
        assert together[i].num_accepted == alone[i].num_accepted == len(alone[i].tokens) - 1
        assert [entry.token for entry in together[i].logprobs] == [entry.token for entry in alone[i].logprobs]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(seed=1)])
def test_a_broken_position_matters_only_if_the_chain_gets_there(params):
    model, tokens = ToyModel(), [1, 2]
    right = generate(model, params, tokens, 2, lambda _: ())
    wrong = (right[0] + 1) % VOCAB
    for drafts, broken in [((right[0], 3), True), ((wrong, 3), False)]:
        logits = model.run(tokens, drafts)
        logits[1, 0] = math.nan
        row = VerifyRow(params, 0, 0, 2, torch.tensor(tokens), (), drafts=drafts)
        (verdict,) = verify(logits, [row])
        assert bool(verdict.error) is broken
        assert (verdict.tokens == ()) is broken


def test_a_broken_position_fails_a_rejection_sampled_row_alone():
    logits = torch.zeros(4, VOCAB)
    logits[0, 2] = math.nan
    q = torch.full((1, VOCAB), 1 / VOCAB)
    rows = [VerifyRow(SamplingParams(), i, 0, 1, torch.tensor([1]), (), (3,), q) for i in range(2)]
    bad, good = verify(logits, rows)
    assert bad.error and not bad.tokens
    assert good.tokens and not good.error


# Distributions: two tokens (a, b) per draw, so that what follows an accepted draft is tested too.


def draw_pairs(params, draft, draft_probs):
    """Counts ``[V * V]`` of the first two tokens over independent seeds; ``draft`` gives the proposals."""
    model, tokens = ToyModel(seed=3), [1, 2]
    history = torch.tensor(tokens)
    drafts = draft(model)
    rows, logits = [], []
    cache = {}
    for seed, proposal in enumerate(drafts):
        if proposal not in cache:
            cache[proposal] = model.run(tokens, proposal)
        logits.append(cache[proposal])
        probs = None if draft_probs is None else draft_probs(model, proposal)
        rows.append(VerifyRow(params, seed * 7919 + 13, 0, 2, history, (), proposal, probs))
    first = verify(torch.cat(logits), rows)
    counts = np.zeros(VOCAB * VOCAB)
    short = []
    for row, verdict in zip(rows, first):
        if len(verdict.tokens) >= 2:
            counts[verdict.tokens[0] * VOCAB + verdict.tokens[1]] += 1
        else:
            short.append((row, verdict.tokens[0]))
    if short:
        follow = [VerifyRow(params, row.seed, 1, 2, torch.tensor([*tokens, token]), ()) for row, token in short]
        second = verify(torch.stack([model.logits([*tokens, token]) for _, token in short]), follow)
        for (_, token), verdict in zip(short, second):
            counts[token * VOCAB + verdict.tokens[0]] += 1
    return counts, pair_probs(model, tokens, params), first


def pair_probs(model, tokens, params):
    first = reference.distribution(model.logits(tokens).double().numpy(), params)
    second = [reference.distribution(model.logits([*tokens, a]).double().numpy(), params) for a in range(VOCAB)]
    return np.concatenate([first[a] * second[a] for a in range(VOCAB)])


@cache
def proposal_probs(model, proposal):
    """A drafter that is neither right nor useless: a flattened and shifted version of the target."""
    tokens = [1, 2]
    rows = [torch.softmax(0.5 * model.logits([*tokens, *proposal[:j]]).roll(1 - j), -1) for j in range(len(proposal))]
    return torch.stack(rows)


def sampled_proposals(model):
    rng = np.random.default_rng(11)
    first = proposal_probs(model, (0, 0))[0].double().numpy()
    for _ in range(DRAWS):
        a = int(rng.choice(VOCAB, p=first / first.sum()))
        second = proposal_probs(model, (a, 0))[1].double().numpy()
        yield (a, int(rng.choice(VOCAB, p=second / second.sum())))


def fixed_proposals(model):
    best = int(model.logits([1, 2]).argmax())
    return [(best, int(model.logits([2, best]).argmax()))] * DRAWS


def no_proposals(model):
    return [()] * DRAWS


CASES = {
    "undrafted": (no_proposals, None),
    "drafted without probabilities": (fixed_proposals, None),
    "drafted with probabilities": (sampled_proposals, proposal_probs),
}


def distance(counts, probs):
    """(chi-square, its bound at about four standard deviations), rare pairs merged."""
    rare = probs < 5 / DRAWS
    assert counts[probs == 0].sum() == 0
    merged = np.append(counts[~rare], counts[rare].sum()), np.append(probs[~rare], probs[rare].sum())
    n = len(merged[1])
    return reference.chi_square(*merged), n + 4 * math.sqrt(2 * n)


@pytest.mark.parametrize(
    "case, params",
    [
        ("undrafted", SamplingParams()),
        ("drafted without probabilities", SamplingParams()),
        ("drafted without probabilities", SamplingParams(temperature=1.5, top_k=5, top_p=0.95)),
        ("drafted with probabilities", SamplingParams()),
        ("drafted with probabilities", SamplingParams(temperature=1.5, top_k=5, top_p=0.95)),
    ],
    ids=["undrafted", "certain", "certain, filtered", "sampled", "sampled, filtered"],
)
def test_the_output_follows_the_target_distribution(case, params):
    counts, probs, first = draw_pairs(params, *CASES[case])
    statistic, bound = distance(counts, probs)
    assert statistic < bound
    if case != "undrafted":
        assert {verdict.num_accepted for verdict in first} == {0, 1, 2}, "the case must exercise every outcome"


def test_the_distribution_test_would_notice_a_bias_of_five_percent():
    counts, probs, _ = draw_pairs(SamplingParams(), *CASES["undrafted"])
    order = np.argsort(probs)[::-1]
    biased = counts.copy()
    moved = 0.05 * DRAWS
    biased[order[0]] -= moved
    biased[order[1:5]] += moved / 4
    statistic, bound = distance(biased, probs)
    assert statistic > bound


def test_using_the_drafts_own_probabilities_matters():
    """The same proposals judged with a wrong ``q`` are visibly biased: the test above can fail."""
    counts, probs, _ = draw_pairs(
        SamplingParams(), sampled_proposals, lambda model, proposal: torch.full((2, VOCAB), 1 / VOCAB)
    )
    statistic, bound = distance(counts, probs)
    assert statistic > bound


def test_a_perfect_drafter_is_never_rejected():
    model, tokens = ToyModel(), [1, 2]
    rows, parts = [], []
    for seed in range(200):
        draft = (seed % VOCAB,)
        q = torch.softmax(model.logits(tokens), -1)[None]
        rows.append(VerifyRow(SamplingParams(), seed, 0, 2, torch.tensor(tokens), (), draft, q))
        parts.append(model.run(tokens, draft))
    assert all(verdict.num_accepted == 1 for verdict in verify(torch.cat(parts), rows))
