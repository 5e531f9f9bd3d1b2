"""Requests in device tables, as :mod:`engine.sampling` is given them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from engine.contracts.request import SamplingParams
from engine.sampling.choose import find_border
from engine.sampling.state import Feature, SamplingBatch, SamplingState, features_of
from engine.sampling.verify import Choice, Verified, accepted_of, choose_tokens, rank_tokens, results

UNWRITTEN = -1
"""Poison after a row's text: it is no token."""


@dataclass(frozen=True, slots=True)
class Request:
    """One whose next tokens are to be chosen."""

    params: SamplingParams
    seed: int = 0
    history: tuple[int, ...] = (1,)
    """Prompt and output so far."""
    prompt_len: int = 1
    stop_ids: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()


def common_features(params: Sequence[SamplingParams]) -> Feature:
    return reduce(or_, map(features_of, params), Feature.NONE)


@dataclass(frozen=True, slots=True)
class Tables:
    """Requests in rows of the tables, and a step that verifies their drafts."""

    requests: tuple[Request, ...]
    state: SamplingState
    text: Tensor
    """int64 ``[rows, width]``"""
    batch: SamplingBatch
    """Of every request's last token and of its drafts, ``N`` positions."""

    @staticmethod
    def of(requests: Sequence[Request], device: str = "cpu") -> Tables:
        """Request ``i`` takes row ``2 * (count - i)``: rows are neither in order nor without gaps."""
        count = len(requests)
        width = 2 + max(len(r.history) + len(r.drafts) for r in requests)
        state = SamplingState(2 * count + 1, device)
        text = torch.full((2 * count + 1, width), UNWRITTEN)
        rows, positions = [], []
        for i, request in enumerate(requests):
            row, tokens = 2 * (count - i), (*request.history, *request.drafts)
            state.write(row, request.params, request.seed, request.prompt_len, request.stop_ids)
            text[row, : len(tokens)] = torch.tensor(tokens)
            rows += [row] * (1 + len(request.drafts))
            positions += range(len(request.history) - 1, len(tokens))
        at = (torch.tensor(values, device=device) for values in (rows, positions))
        batch = state.at(*at, common_features([r.params for r in requests]))
        return Tables(tuple(requests), state, text.to(device), batch)

    @property
    def num_drafts(self) -> tuple[int, ...]:
        return tuple(len(r.drafts) for r in self.requests)

    def choose(self, logits: Tensor, on_triton: bool = False) -> tuple[Tensor, Tensor]:
        """Tokens ``[N]`` and adjusted logits of ``logits`` (float32 ``[N, V]``, left alone)."""
        longest = self.text.shape[1] - 2
        return choose_tokens(logits.clone(), self.batch, self.state, self.text, longest, on_triton)

    def verify(self, logits: Tensor) -> list[Verified]:
        """What each request comes to."""
        tokens, adjusted = self.choose(logits)
        inputs = self.text[self.batch.rows, self.batch.positions]
        ranked = rank_tokens(adjusted, tokens, self.num_drafts, [r.params.logprobs for r in self.requests])
        choice = Choice(self.num_drafts, tokens, accepted_of(inputs, tokens, self.num_drafts), ranked)
        return results(choice, choice.tensors)


def verify(logits: Tensor, requests: Sequence[Request]) -> list[Verified]:
    """What each request comes to. ``logits``: float32 ``[N, V]``, request by request, left alone."""
    return Tables.of(requests).verify(logits)


def choose_tokens_of(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """The target's token at every position, int64 ``[N]``."""
    return Tables.of(requests).choose(logits)[0]


def batch_of(
    params: Sequence[SamplingParams], seeds: Sequence[int], output_index: Sequence[int], device: str = "cpu"
) -> SamplingBatch:
    """One position of one request each, with nothing to adjust."""
    state = SamplingState(len(params), device)
    for row, (request, seed) in enumerate(zip(params, seeds, strict=True)):
        state.write(row, request, seed, 1, ())
    at = (torch.tensor(values, device=device) for values in (range(len(params)), output_index))
    return state.at(*at, common_features(params))


def many_draws(params: SamplingParams, seeds: Tensor, output_index: Tensor) -> SamplingBatch:
    """Positions of requests that differ in nothing else, both int64 ``[N]``."""
    one = batch_of([params], [0], [0]).take(torch.zeros_like(seeds))
    return replace(one, seeds=seeds, output_index=output_index, positions=output_index)


def target_probs(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """What sampled positions draw from: the filtered softmax of adjusted logits, float32 ``[N, V]``."""
    scaled = (logits - logits.amax(-1, keepdim=True)) / batch.temperature[:, None]
    border = find_border(scaled, batch)
    return scaled.masked_fill(scaled < border[:, None], float("-inf")).softmax(-1)
