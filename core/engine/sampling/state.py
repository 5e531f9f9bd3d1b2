"""What sampling needs to know of each request, by row of the device tables: written at admission, read in every step.

A step gathers from these columns on the device, so it needs nothing of sampling from the host but row ids.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from engine.contracts.request import MAX_BIASED_TOKENS, MAX_STOP_TOKENS, SamplingParams
from engine.kernels.transfer import upload
from engine.kernels.triton.device import runs_triton
from engine.sampling.philox import signed64

STATE_BYTES_PER_ROW = 5 * 4 + 8 + 4 * 8 + MAX_BIASED_TOKENS * (8 + 4) + MAX_STOP_TOKENS * 8
"""What :class:`SamplingState` takes for a request."""

_PROMPT_LEN = 2
"""Of the integers, see :class:`SamplingState`."""
_MOST = 2**31 - 1
"""A count beyond this is as good as this, and kernels take 32 bits."""


class Feature(enum.IntFlag):
    """What a request asks of sampling beside the most likely token. The host decides by it which kernels run."""

    NONE = 0
    SAMPLED = enum.auto()
    """temperature > 0"""
    FILTERED = enum.auto()
    """top-k or top-p (min-p needs no kernel of its own)"""
    PENALISED = enum.auto()
    BIASED = enum.auto()
    MIN_TOKENS = enum.auto()
    LOGPROBS = enum.auto()
    CONSTRAINED = enum.auto()
    """By a grammar, or a budget of thoughts: logits are masked before they are adjusted."""

    @property
    def adjusts(self) -> bool:
        """Whether logits change before a token is chosen."""
        return bool(self & (Feature.PENALISED | Feature.BIASED | Feature.MIN_TOKENS))


def features_of(params: SamplingParams, vocab_size: int | None = None) -> Feature:
    """``vocab_size``: a top-k that keeps all of it is none."""
    found = Feature.NONE
    if params.temperature != 0.0:
        found |= Feature.SAMPLED
        if params.top_p < 1.0 or 0 < params.top_k < (vocab_size or 1 << 62):
            found |= Feature.FILTERED
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0:
        found |= Feature.PENALISED
    if params.logit_bias:
        found |= Feature.BIASED
    if params.min_tokens > 0:
        found |= Feature.MIN_TOKENS
    if params.logprobs is not None:
        found |= Feature.LOGPROBS
    if params.grammar is not None or params.reasoning is not None:
        found |= Feature.CONSTRAINED
    return found


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of ``N`` output positions; all tensors ``[N]`` on the device and only read.

    ``features``: of all requests together; the host's promise that nobody asks for more.
    """

    rows: Tensor
    """int64: row of the device tables"""
    positions: Tensor
    """int64: position of the token whose logits these are; the token to be chosen is at the next one"""
    output_index: Tensor
    """int64: 0 for the first token after the prompt"""
    prompt_len: Tensor
    """int64"""
    temperature: Tensor
    """float32; 0 is greedy"""
    top_k: Tensor
    """int64; 0, or as large as the vocabulary, keeps all"""
    top_p: Tensor
    """float64 (cuts exactly where the host's Python float would); 1 keeps all"""
    min_p: Tensor
    """float32; 0 keeps all"""
    seeds: Tensor
    """int64: any 64 bits"""
    repetition: Tensor
    """float32; 1 is off"""
    presence: Tensor
    """float32; 0 is off"""
    frequency: Tensor
    """float32; 0 is off"""
    min_tokens: Tensor
    """int64"""
    features: Feature

    def take(self, index: Tensor | slice) -> SamplingBatch:
        """Some of the positions. ``index``: int64 ``[M]``, or a slice, of which the tensors are views."""
        columns = {f.name: getattr(self, f.name)[index] for f in fields(self) if f.name != "features"}
        return SamplingBatch(**columns, features=self.features)


class SamplingState:
    """The columns. ``num_rows``: rows of the device tables, nobody's included."""

    def __init__(self, num_rows: int, device: str) -> None:
        self._device = device
        self._on_triton = runs_triton(device)
        self._floats = torch.zeros(5, num_rows, dtype=torch.float32, device=device)
        """temperature, min_p, repetition, presence, frequency"""
        self._floats[2] = 1.0
        self._top_p = torch.ones(num_rows, dtype=torch.float64, device=device)
        self._ints = torch.zeros(4, num_rows, dtype=torch.int64, device=device)
        """top_k, seed, prompt_len, min_tokens"""
        self.bias_ids = torch.zeros(num_rows, MAX_BIASED_TOKENS, dtype=torch.int64, device=device)
        self.bias_values = torch.zeros(num_rows, MAX_BIASED_TOKENS, dtype=torch.float32, device=device)
        """Unused entries add 0 to some token."""
        self.stop_ids = torch.zeros(num_rows, MAX_STOP_TOKENS, dtype=torch.int64, device=device)
        """Tokens that may not be chosen before ``min_tokens``; unused entries repeat the first."""

    @property
    def nbytes(self) -> int:
        columns = (self._floats, self._top_p, self._ints, self.bias_ids, self.bias_values, self.stop_ids)
        return sum(column.nbytes for column in columns)

    def write(self, row: int, params: SamplingParams, seed: int, prompt_len: int, stop_ids: Sequence[int]) -> None:
        """A request takes a row. ``seed``: resolved, 64 bits of either signedness."""
        min_tokens = params.min_tokens if stop_ids else 0  # with nothing to forbid, any length will do
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        floats = (params.temperature, params.min_p, *penalties)
        ints = (min(params.top_k, _MOST), signed64(seed), prompt_len, min(min_tokens, _MOST))
        self._floats[:, row] = upload(floats, torch.float32, self._device)
        self._top_p[row] = params.top_p
        self._ints[:, row] = upload(ints, torch.int64, self._device)
        self.bias_values[row].zero_()
        if params.logit_bias:
            count = len(params.logit_bias)
            self.bias_ids[row, :count] = upload(tuple(params.logit_bias), torch.int64, self._device)
            self.bias_values[row, :count] = upload(tuple(params.logit_bias.values()), torch.float32, self._device)
        if min_tokens > 0:
            padded = [*stop_ids, *[stop_ids[0]] * (MAX_STOP_TOKENS - len(stop_ids))]
            self.stop_ids[row] = upload(padded, torch.int64, self._device)

    def addresses(self) -> tuple[int, int, int, int]:
        """Of temperature and min_p, top_p, and the integers, on a CPU; and how many rows they have."""
        return self._floats.data_ptr(), self._top_p.data_ptr(), self._ints.data_ptr(), len(self._top_p)

    def at(self, rows: Tensor, positions: Tensor, features: Feature) -> SamplingBatch:
        """Parameters of the positions that follow tokens ``positions`` of ``rows``, both int64 ``[N]``."""
        if self._on_triton:
            from engine.sampling.triton.columns import gathered_columns  # Triton is imported only where it runs

            floats, top_p, ints, output_index = gathered_columns(
                rows, positions, self._floats, self._top_p, self._ints, _PROMPT_LEN
            )
        else:
            floats, ints = self._floats.index_select(1, rows), self._ints.index_select(1, rows)
            top_p, output_index = self._top_p.index_select(0, rows), positions + 1 - ints[_PROMPT_LEN]
        temperature, min_p, repetition, presence, frequency = floats.unbind()
        top_k, seeds, prompt_len, min_tokens = ints.unbind()
        return SamplingBatch(
            rows=rows,
            positions=positions,
            output_index=output_index,
            prompt_len=prompt_len,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seeds=seeds,
            repetition=repetition,
            presence=presence,
            frequency=frequency,
            min_tokens=min_tokens,
            features=features,
        )
