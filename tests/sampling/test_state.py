from dataclasses import fields

import pytest
import torch

from engine.contracts.request import MAX_BIASED_TOKENS, MAX_STOP_TOKENS, SamplingParams
from engine.sampling.adjust import adjust_
from engine.sampling.philox import signed64
from engine.sampling.state import STATE_BYTES_PER_ROW, Feature, SamplingState, features_of

VOCAB, PROMPT_LEN = 30, 2
ADJUSTING = Feature.PENALISED | Feature.BIASED | Feature.MIN_TOKENS
TEXT = torch.tensor([[9, 9, 9, 9], [3, 3, 5, 4], [9, 9, 9, 9]])

REQUESTS = {
    "plain": (SamplingParams(), 0, ()),
    "biased": (SamplingParams(logit_bias={1: -5.0, 2: 4.0, 7: 1.0}), 1, ()),
    "biased less": (SamplingParams(logit_bias={7: 2.0}), 2, ()),
    "forbids many": (SamplingParams(min_tokens=9), 3, (0, 4, 6)),
    "forbids one": (SamplingParams(min_tokens=5), 4, (8,)),
    "forbids too late": (SamplingParams(min_tokens=1), 5, (8,)),
    "has nothing to forbid": (SamplingParams(min_tokens=9), 6, ()),
    "everything": (
        SamplingParams(
            temperature=0.4, top_k=7, top_p=0.7, min_p=0.2, min_tokens=9, repetition_penalty=1.5, presence_penalty=0.3,
            frequency_penalty=-0.2, logit_bias={0: 1.0, 29: -1.0, 5: 3.0},
        ),
        2**64 - 1, (1, 2, 3, 4),
    ),
}  # fmt: skip


def state_after(*names):
    """Of three rows, the middle one taken by these requests, one after another."""
    state = SamplingState(3, "cpu")
    for name in names:
        params, seed, stop_ids = REQUESTS[name]
        state.write(1, params, seed, PROMPT_LEN, stop_ids)
    return state


def seen_of(state, row=1):
    """What a step reads of a row: its parameters, and logits that are asked for every adjustment."""
    at = (torch.full((2,), row), torch.tensor([1, 3]))
    batch = state.at(*at, ADJUSTING)
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    adjust_(logits, batch, state, TEXT, TEXT.shape[1])
    return [getattr(batch, f.name) for f in fields(batch) if f.name != "features"] + [logits]


@pytest.mark.parametrize("later", REQUESTS)
@pytest.mark.parametrize("former", REQUESTS)
def test_a_row_written_twice_keeps_nothing_of_its_former_request(former, later):
    reused, fresh = seen_of(state_after(former, later)), seen_of(state_after(later))
    assert all(torch.equal(a, b) for a, b in zip(reused, fresh, strict=True))


def test_a_request_changes_no_other_row():
    untouched = SamplingState(3, "cpu")
    for row in (0, 2):
        after = seen_of(state_after("everything"), row)
        assert all(torch.equal(a, b) for a, b in zip(after, seen_of(untouched, row), strict=True))


def test_a_row_nobody_wrote_leaves_logits_alone():
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    assert torch.equal(seen_of(SamplingState(3, "cpu"), 2)[-1], logits)


def test_positions_get_the_parameters_of_their_rows():
    state = SamplingState(3, "cpu")
    params, seed, stop_ids = REQUESTS["everything"]
    state.write(2, params, seed, 5, stop_ids)
    batch = state.at(torch.tensor([2, 0, 2]), torch.tensor([4, 0, 8]), Feature.NONE)
    assert batch.output_index.tolist() == [0, 1, 4] and batch.prompt_len.tolist() == [5, 0, 5]
    assert batch.top_k.tolist() == [7, 0, 7] and batch.top_p.tolist() == [0.7, 1.0, 0.7]
    assert batch.seeds.tolist() == [signed64(seed), 0, signed64(seed)] and batch.min_tokens.tolist() == [9, 0, 9]
    columns = {
        "temperature": (0.4, 0.0), "min_p": (0.2, 0.0), "repetition": (1.5, 1.0), "presence": (0.3, 0.0),
        "frequency": (-0.2, 0.0),
    }  # fmt: skip
    for name, (written, unwritten) in columns.items():
        assert torch.equal(getattr(batch, name), torch.tensor([written, unwritten, written])), name


def test_some_positions_of_a_batch_keep_their_parameters():
    state = state_after("everything")
    rows, positions = torch.tensor([0, 1, 2, 1]), torch.tensor([3, 2, 1, 0])
    taken = state.at(rows, positions, ADJUSTING).take(torch.tensor([3, 1]))
    direct = state.at(rows[[3, 1]], positions[[3, 1]], ADJUSTING)
    assert taken.features == direct.features == ADJUSTING
    assert all(
        torch.equal(getattr(taken, f.name), getattr(direct, f.name)) for f in fields(direct) if f.name != "features"
    )


def test_the_most_biased_and_stop_tokens_that_requests_may_name_fit_a_row():
    params = SamplingParams(logit_bias={i: float(i) for i in range(MAX_BIASED_TOKENS)}, min_tokens=1)
    state = SamplingState(1, "cpu")
    state.write(0, params, 0, 1, range(MAX_STOP_TOKENS))
    vocab = MAX_BIASED_TOKENS + 1
    logits = torch.zeros(1, vocab)
    batch = state.at(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), features_of(params))
    adjust_(logits, batch, state, TEXT, 1)
    want = torch.arange(vocab).float()
    want[MAX_BIASED_TOKENS] = 0.0
    want[:MAX_STOP_TOKENS] = float("-inf")
    assert torch.equal(logits[0], want)


@pytest.mark.parametrize("top_k", [2**31, 2**32 + 5, 2**63])
def test_a_top_k_of_any_size_keeps_all(top_k):
    """The kernels take 32 bits: 2**32 + 5 must not become 5."""
    state = SamplingState(1, "cpu")
    state.write(0, SamplingParams(top_k=top_k), 0, 1, ())
    zero = torch.zeros(1, dtype=torch.int64)
    assert int(state.at(zero, zero, Feature.FILTERED).top_k.to(torch.int32)) == 2**31 - 1


def test_the_bytes_of_a_row_are_what_is_said_of_it():
    assert SamplingState(7, "cpu").nbytes == 7 * STATE_BYTES_PER_ROW


@pytest.mark.parametrize(
    ("settings", "features"),
    [
        ({"temperature": 0.0}, Feature.NONE),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5}, Feature.NONE),
        ({}, Feature.SAMPLED),
        ({"min_p": 0.1}, Feature.SAMPLED),
        ({"top_p": 0.9}, Feature.SAMPLED | Feature.FILTERED),
        ({"top_k": VOCAB - 1}, Feature.SAMPLED | Feature.FILTERED),
        ({"top_k": VOCAB}, Feature.SAMPLED),
        ({"temperature": 0.0, "presence_penalty": -0.1}, Feature.PENALISED),
        ({"temperature": 0.0, "frequency_penalty": 0.1}, Feature.PENALISED),
        ({"temperature": 0.0, "repetition_penalty": 0.9}, Feature.PENALISED),
        ({"temperature": 0.0, "logit_bias": {1: 1.0}}, Feature.BIASED),
        ({"temperature": 0.0, "min_tokens": 1}, Feature.MIN_TOKENS),
        ({"temperature": 0.0, "logprobs": 0}, Feature.LOGPROBS),
    ],
)
def test_features_are_what_the_parameters_ask_for(settings, features):
    params = SamplingParams(**settings)
    assert features_of(params, VOCAB) == features
    assert features.adjusts == bool(features & ADJUSTING)
    if params.top_k != VOCAB:
        assert features_of(params) == features
