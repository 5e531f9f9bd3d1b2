"""What requests do to logits. That it is what the reference does, ``test_choose`` tests with whole distributions."""

import pytest
import torch

from engine.contracts.request import SamplingParams

from .requests import Request, Tables

VOCAB = 12
LOGITS = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))


def adjusted(params, drafts=(), **rest):
    request = Request(params, drafts=drafts, **rest)
    return Tables.of([request]).choose(LOGITS.expand(1 + len(drafts), -1))[1]


def test_biased_tokens_outside_the_vocabulary_are_ignored():
    got = adjusted(SamplingParams(logit_bias={VOCAB: 5.0, 2: 1.0, 10_000: -3.0, 0: -1.0}))
    assert torch.equal(got, adjusted(SamplingParams(logit_bias={2: 1.0, 0: -1.0})))


def test_stop_tokens_outside_the_vocabulary_are_ignored():
    got = adjusted(SamplingParams(min_tokens=3), stop_ids=(VOCAB, 4, 10_000))
    assert got.isinf().nonzero().tolist() == [[0, 4]]
    assert torch.equal(adjusted(SamplingParams(min_tokens=3), stop_ids=(VOCAB,)), LOGITS)


@pytest.mark.parametrize("params", [
    SamplingParams(presence_penalty=0.5), SamplingParams(frequency_penalty=0.3), SamplingParams(repetition_penalty=1.4),
    SamplingParams(presence_penalty=-0.5, frequency_penalty=0.3, repetition_penalty=0.8), SamplingParams(min_tokens=3),
])  # fmt: skip
def test_a_position_after_drafts_sees_them_as_if_they_had_been_generated(params):
    """Also drafts that occur in the prompt, in the output and twice among themselves."""
    history, drafts = (5, 5, 2, 7), (7, 5, 1, 1)
    together = adjusted(params, drafts, history=history, prompt_len=3, stop_ids=(0, 9))
    for j in range(len(drafts) + 1):
        alone = adjusted(params, history=(*history, *drafts[:j]), prompt_len=3, stop_ids=(0, 9))
        assert torch.equal(together[j], alone[0])
    assert len(together.unique(dim=0)) > 1


def test_stop_tokens_are_forbidden_until_the_output_is_long_enough():
    got = adjusted(SamplingParams(min_tokens=2), (3, 3, 3), history=(1, 2), prompt_len=2, stop_ids=(6,))
    assert got[:, 6].isinf().tolist() == [True, True, False, False]
