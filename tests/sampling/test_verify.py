import math

import numpy as np
import pytest
import torch

from engine.contracts.request import SamplingParams
from engine.sampling.choose import choose
from engine.sampling.verify import accepted_of

from .requests import Request, many_draws, verify

VOCAB = 8
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
        request = Request(params, seed, tuple(tokens), len(prompt), (0,), drafts)
        tokens += verify(model.run(tokens, drafts), [request])[0].tokens
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


ANY_NUM_DRAFTS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=0.8),
    "sampled, filtered": SamplingParams(top_k=4, top_p=0.9),
    "greedy, penalised": SamplingParams(
        temperature=0.0, presence_penalty=0.7, frequency_penalty=0.5, repetition_penalty=1.3
    ),
    "sampled, penalised": SamplingParams(frequency_penalty=0.6, repetition_penalty=1.2),
    "greedy, long enough": SamplingParams(temperature=0.0, min_tokens=25, logit_bias={0: 3.0}),
}


@pytest.mark.parametrize("name", ANY_NUM_DRAFTS)
def test_drafts_never_change_the_tokens(name):
    params, model = ANY_NUM_DRAFTS[name], ToyModel()
    plain = generate(model, params, (1, 2), 40, lambda tokens: ())
    for seed in range(3):
        assert generate(model, params, (1, 2), 40, guesses(model, seed)) == plain


@pytest.mark.parametrize("params", [GREEDY, SamplingParams()], ids=["greedy", "sampled"])
def test_exactly_the_matching_prefix_is_accepted(params):
    model, tokens = ToyModel(), (1, 2)
    right = generate(model, params, tokens, 4, lambda _: ())
    for first_wrong in range(4):
        drafts = [*right[:first_wrong], *[(token + 1) % VOCAB for token in right[first_wrong:3]]]
        (verdict,) = verify(model.run(tokens, drafts), [Request(params, 0, tokens, 2, (), tuple(drafts))])
        assert verdict.num_accepted == first_wrong
        assert list(verdict.tokens) == right[: first_wrong + 1]


def test_a_right_draft_after_a_wrong_one_is_not_accepted():
    model, tokens = ToyModel(), (1, 2)
    first = int(model.logits(tokens).argmax())
    wrong = (first + 1) % VOCAB
    drafts = (wrong, int(model.logits([2, wrong]).argmax()))
    (verdict,) = verify(model.run(tokens, drafts), [Request(GREEDY, 0, tokens, 2, (), drafts)])
    assert verdict.num_accepted == 0 and verdict.tokens == (first,)


def test_a_batch_of_all_kinds_gives_each_request_what_it_gets_alone():
    model, tokens = ToyModel(), (1, 2)
    kinds = [
        (GREEDY, (3,)),
        (SamplingParams(), (3, 4)),
        (SamplingParams(logprobs=2), (3, 4)),
        (SamplingParams(), ()),
        (SamplingParams(logprobs=1, min_tokens=3), (5, 6, 1)),
        (SamplingParams(temperature=0.0, presence_penalty=1.0), (2, 2)),
        (SamplingParams(top_k=3, logit_bias={4: 2.0}, logprobs=2), (4, 4)),
    ]
    requests = [Request(params, i, tokens, 2, (0,), drafts) for i, (params, drafts) in enumerate(kinds)]
    parts = [model.run(tokens, request.drafts) for request in requests]
    together = verify(torch.cat(parts), requests)
    alone = [verify(part, [request])[0] for part, request in zip(parts, requests)]
    for i in range(len(requests)):
        assert together[i].tokens == alone[i].tokens
        assert together[i].num_accepted == alone[i].num_accepted == len(alone[i].tokens) - 1
        assert [entry.token for entry in together[i].logprobs] == [entry.token for entry in alone[i].logprobs]
        assert len(alone[i].logprobs) == (0 if requests[i].params.logprobs is None else len(alone[i].tokens))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.9)])
def test_a_broken_position_matters_only_if_the_chain_gets_there(params):
    model, tokens = ToyModel(), (1, 2)
    right = generate(model, params, tokens, 2, lambda _: ())
    wrong = (right[0] + 1) % VOCAB
    for drafts, broken in [((right[0], 3), True), ((wrong, 3), False)]:
        logits = model.run(tokens, drafts)
        logits[1, 0] = math.nan
        (verdict,) = verify(logits, [Request(params, 0, tokens, 2, (), drafts)])
        assert bool(verdict.error) is broken
        assert (verdict.tokens == ()) is broken


def accepted_by_hand(inputs, tokens, num_drafts):
    """One draft after another."""
    found, begin = [], 0
    for count in num_drafts:
        accepted = 0
        while accepted < count and inputs[begin + accepted + 1] == tokens[begin + accepted]:
            accepted += 1
        found.append(accepted)
        begin += count + 1
    return found


@pytest.mark.parametrize("num_drafts", [(0,), (0, 0), (4,), (3, 3, 3), (2, 0, 4), (0, 5), (5, 0), (1, 4, 0, 2)])
def test_ragged_and_uniform_batches_accept_what_is_found_one_by_one(num_drafts):
    generator = torch.Generator().manual_seed(sum(num_drafts))
    total = sum(1 + count for count in num_drafts)
    seen = set()
    for _ in range(200):
        # Two tokens, so that runs of every length match; what follows a request is the next one's.
        inputs, tokens = torch.randint(0, 2, (2, total), generator=generator)
        want = accepted_by_hand(inputs.tolist(), tokens.tolist(), num_drafts)
        assert accepted_of(inputs, tokens, num_drafts).tolist() == want
        ends = torch.tensor(num_drafts).add(1).cumsum(0).tolist()
        parts = [slice(end - 1 - count, end) for end, count in zip(ends, num_drafts)]
        alone = [int(accepted_of(inputs[p], tokens[p], (count,))) for p, count in zip(parts, num_drafts)]
        assert alone == want
        seen |= set(want)
    assert seen == set(range(max(num_drafts) + 1))


def test_a_drafter_with_the_targets_logits_and_noise_is_always_accepted():
    model, n = ToyModel(), 200
    logits = model.logits([1, 2]).expand(n, -1)
    noise = many_draws(SamplingParams(), torch.arange(n), torch.zeros(n, dtype=torch.int64))
    drafts = choose(logits, noise).tolist()
    requests = [Request(SamplingParams(), i, (1, 2), 2, (), (draft,)) for i, draft in enumerate(drafts)]
    verdicts = verify(torch.cat([model.run((1, 2), (draft,)) for draft in drafts]), requests)
    assert all(verdict.num_accepted == 1 for verdict in verdicts) and len(set(drafts)) > 3


def test_drafts_drawn_with_the_targets_noise_are_accepted_more_often_than_the_most_likely_tokens():
    n, vocab = 2000, 50
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(1, vocab, generator=generator)
    drafter = (target + 0.3 * torch.randn(1, vocab, generator=generator)).expand(n, -1)
    noise = many_draws(SamplingParams(), torch.arange(n), torch.zeros(n, dtype=torch.int64))
    tokens = choose(target.expand(n, -1), noise)
    shared, likely = (choose(drafter, noise) == tokens).float(), (drafter.argmax(-1) == tokens).float()
    assert float(shared.mean()) > 0.6 and float(likely.mean()) < 0.2
