"""What each parameter means: whole outputs on scripted logits equal, token by token, those of a sampler of NumPy."""

import numpy as np
import pytest
import torch

from engine.contracts.request import SamplingParams

from . import reference
from .requests import Request, verify
from .test_choose import SETTINGS

VOCAB = 40
PROMPT, STOPS = (1, 2, 3, 3, 7), (0, 6)
SEED = 2**63 + 12345
LENGTH = 40

ALL_SETTINGS = {
    **SETTINGS,
    "greedy": {"temperature": 0.0},
    "greedy, penalised": {"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
    "greedy, repeating": {"temperature": 0.0, "presence_penalty": -2.0, "repetition_penalty": 0.5},
    "greedy, long enough": {"temperature": 0.0, "min_tokens": LENGTH, "logit_bias": {0: 50.0}},
}


def script(length):
    """Logits by output position, float32 ``[length, V]``: whatever was said, these come next."""
    return torch.randn(length, VOCAB, generator=torch.Generator().manual_seed(9)) * 3


def said(params, logits):
    """An output, and the logprobs of each token as they are reported."""
    tokens, logprobs = list(PROMPT), []
    for row in logits:
        (verdict,) = verify(row[None], [Request(params, SEED, tuple(tokens), len(PROMPT), STOPS)])
        tokens += verdict.tokens
        logprobs += verdict.logprobs
    return tokens[len(PROMPT) :], logprobs


@pytest.mark.parametrize("name", ALL_SETTINGS)
def test_whole_outputs_are_those_of_plain_numpy(name):
    params, logits, tokens = SamplingParams(**ALL_SETTINGS[name]), script(LENGTH), list(PROMPT)
    for row in logits.numpy():
        tokens.append(reference.next_token(row, params, SEED, tokens, len(PROMPT), STOPS))
    assert said(params, logits)[0] == tokens[len(PROMPT) :]


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
def test_a_bias_of_100_always_chooses_and_one_of_minus_100_never(temperature):
    logits = script(120)
    free = set(said(SamplingParams(temperature=temperature), logits)[0])
    assert len(free) > 16
    banned = dict.fromkeys(sorted(free)[:16], -100.0)
    assert not set(said(SamplingParams(temperature=temperature, logit_bias=banned), logits)[0]) & set(banned)
    assert set(said(SamplingParams(temperature=temperature, logit_bias={17: 100.0}), logits)[0]) == {17}


@pytest.mark.parametrize(
    ("settings", "seen", "twice", "unseen"),
    [
        ({"presence_penalty": 1.5}, -1.5, -1.5, 0.0),
        ({"presence_penalty": -1.5}, 1.5, 1.5, 0.0),
        ({"frequency_penalty": 0.5}, -0.5, -1.0, 0.0),
        ({"frequency_penalty": -0.5}, 0.5, 1.0, 0.0),
    ],
)
def test_penalties_move_what_was_said_by_what_they_say_and_nothing_else(settings, seen, twice, unseen):
    """Token 4 was said once, 5 twice; 1 and 2 are in the prompt only."""

    def reported(**more):
        request = Request(SamplingParams(temperature=0.0, logprobs=VOCAB, **more), 0, (*PROMPT, 4, 5, 5), len(PROMPT))
        (entry,) = verify(script(1), [request])[0].logprobs
        return np.array([logprob for _, logprob in sorted(entry.top)])

    change = reported(**settings) - reported()
    change -= change[39]  # logprobs move together when their sum does; a token nobody said shows by how much
    want = {4: seen, 5: twice}
    np.testing.assert_allclose(change, [want.get(token, unseen) for token in range(VOCAB)], atol=1e-5)


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_moves_tokens_of_prompt_and_output_down_or_up_whatever_their_sign(penalty):
    logits = script(1)
    text = {*PROMPT, 4}
    assert {bool(logits[0, token] > 0) for token in text} == {True, False}
    params = SamplingParams(temperature=0.0, repetition_penalty=penalty, logprobs=VOCAB)
    (entry,) = verify(logits, [Request(params, 0, (*PROMPT, 4), len(PROMPT))])[0].logprobs
    plain = logits[0].double().log_softmax(0)
    moved = {token: logprob - float(plain[token]) for token, logprob in entry.top}
    base = moved[39]
    for token, change in moved.items():
        direction = np.sign(round(change - base, 5))
        assert direction == (np.sign(1.0 - penalty) if token in text else 0), token


@pytest.mark.parametrize("top", [0, 1, 5, VOCAB, 100])
def test_as_many_alternatives_are_reported_as_were_asked_for_best_first(top):
    tokens, logprobs = said(SamplingParams(logprobs=top), script(10))
    assert [entry.token for entry in logprobs] == tokens
    for row, entry in zip(script(10).double().log_softmax(1), logprobs):
        assert len(entry.top) == min(top, VOCAB)
        assert [logprob for _, logprob in entry.top] == sorted((p for _, p in entry.top), reverse=True)
        np.testing.assert_allclose([entry.logprob], [float(row[entry.token])], atol=1e-5)
