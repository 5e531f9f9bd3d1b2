import math

import torch

from engine.contracts.request import SamplingParams
from engine.sampling.logprobs import listed, rank, rank_prompt

from .requests import Request, verify


def logits(rows, vocab=50):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(5)) * 2


def test_logprobs_are_those_of_the_softmax():
    x = logits(3)
    expected = x.double().log_softmax(-1)
    for i, entry in enumerate(listed(*rank(x, torch.tensor([4, 0, 49]), 3))):
        assert math.isclose(entry.logprob, float(expected[i, entry.token]), abs_tol=1e-5)
        best = expected[i].topk(3)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert all(math.isclose(a, b, abs_tol=1e-5) for (_, a), b in zip(entry.top, best.values.tolist()))


def test_zero_alternatives_still_give_the_tokens_own_logprob():
    (entry,) = listed(*rank(logits(1), torch.tensor([7]), 0))
    assert entry.token == 7 and entry.logprob < 0 and entry.top == ()


def test_equally_likely_tokens_are_listed_by_id():
    (entry,) = listed(*rank(torch.zeros(1, 6), torch.tensor([0]), 6))
    assert [token for token, _ in entry.top] == [0, 1, 2, 3, 4, 5]


def test_long_prompts_are_worked_off_in_pieces_with_the_same_result(monkeypatch):
    x, targets = logits(11), torch.arange(11)
    whole = listed(*rank_prompt(x, targets, 2))
    monkeypatch.setattr("engine.sampling.logprobs._CHUNK_ELEMENTS", 150)
    assert listed(*rank_prompt(x, targets, 2)) == whole
    assert [entry.token for entry in whole] == list(range(11))


def test_output_logprobs_ignore_temperature_but_see_penalties():
    x = logits(1)

    def first(**settings):
        params = SamplingParams(logprobs=50, **settings)
        (entry,) = verify(x, [Request(params, seed=3, history=(1, 2, 2))])[0].logprobs
        return dict(entry.top)

    plain = first()
    assert first(temperature=0.2, top_k=3) == plain
    assert first(frequency_penalty=1.0)[2] < plain[2] - 1.0


def test_rows_get_as_many_alternatives_as_they_asked_for():
    x = logits(4)
    rows = [Request(SamplingParams(temperature=0.0, logprobs=n)) for n in (None, 0, 2, 5)]
    verdicts = verify(x, rows)
    assert verdicts[0].logprobs == ()
    assert [len(v.logprobs[0].top) for v in verdicts[1:]] == [0, 2, 5]
    assert all(v.logprobs[0].token == v.tokens[0] for v in verdicts[1:])
