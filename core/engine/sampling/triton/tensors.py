"""The memory the sampling kernels work in."""

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
