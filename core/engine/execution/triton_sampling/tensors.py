"""What the kernels are told about each position, and the memory they work in. All on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1024
"""Logits per program: one position of a vocabulary of 128,256 is 126 programs; an H200 has 132 multiprocessors."""
LIST_LENGTH = 1 << 14
"""Tokens above the first estimate of a border that are kept in a list. If there are more, the search goes through the
whole row instead: the same border, only later."""


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters by position. ``N`` positions; the tensors are only read.

    The two flags are the host's: they say which launches a graph is captured with.
    """

    temperature: Tensor
    """float32 ``[N]``; 0 is greedy."""
    top_k: Tensor
    """int32 ``[N]``; 0, or as large as the vocabulary, keeps all."""
    top_p: Tensor
    """float32 or float64 ``[N]``; 1 keeps all. float64 cuts exactly where the host's Python float would."""
    min_p: Tensor
    """float32 ``[N]``; 0 keeps all."""
    seeds: Tensor
    """int64 ``[N]``: any 64 bits."""
    positions: Tensor
    """int64 ``[N]``: output positions, 0 for the first token after the prompt."""
    sampled: bool = True
    """False promises that every position is greedy: one launch instead of two."""
    filtered: bool = True
    """False promises that no position has top-k or top-p: two launches instead of three. (min-p needs no launch.)"""


@dataclass(frozen=True, slots=True)
class SamplingScratch:
    """Memory of the kernels, for up to ``rows`` positions. Reused by calls that one stream orders; the counters are 0
    between calls."""

    chunk_best: Tensor
    """float32 ``[rows, chunks]``: largest logit, later largest score, of each chunk."""
    chunk_index: Tensor
    """int32 ``[rows, chunks]``: where it is."""
    chunk_mass: Tensor
    """float32 ``[rows, chunks]``: sum of ``exp((logit - largest of the chunk) / temperature)``."""
    facts: Tensor
    """float32 ``[4, rows]``: largest logit, border, first estimate of the border, normaliser. See ``survey.py``."""
    listed: Tensor
    """float32 ``[rows, LIST_LENGTH]``: scaled logits above the estimate."""
    counters: Tensor
    """int32 ``[2, rows]``: arrivals, entries of ``listed``."""

    @staticmethod
    def allocate(rows: int, vocab: int, device: torch.device | str) -> SamplingScratch:
        """About 64 KiB a row and 12 bytes a chunk."""
        chunks = -(-vocab // CHUNK)
        return SamplingScratch(
            torch.empty(rows, chunks, dtype=torch.float32, device=device),
            torch.empty(rows, chunks, dtype=torch.int32, device=device),
            torch.empty(rows, chunks, dtype=torch.float32, device=device),
            torch.empty(4, rows, dtype=torch.float32, device=device),
            torch.empty(rows, LIST_LENGTH, dtype=torch.float32, device=device),
            torch.zeros(2, rows, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class PenaltyTensors:
    """Penalties by position, and the text they look at."""

    history: Tensor
    """int64 ``[slots, width]``: prompt, output and, after them, the drafts to be verified, by request slot."""
    slots: Tensor
    """int64 ``[N]``: the row of ``history`` of each position."""
    prompt_lens: Tensor
    """int64 ``[N]``."""
    ends: Tensor
    """int64 ``[N]``: tokens before the position, drafts included."""
    repetition: Tensor
    """float32 ``[N]``; 1 is off."""
    presence: Tensor
    """float32 ``[N]``; 0 is off."""
    frequency: Tensor
    """float32 ``[N]``; 0 is off."""
