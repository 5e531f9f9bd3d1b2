"""From output positions to the sampling kernels: their parameters go up in one copy, and nothing waits.

For models lowered to Triton; elsewhere, and as the definition of what comes out, ``sampling.choose`` and ``adjust`` are
plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from engine.execution.philox import signed64
from engine.execution.positions import Position
from engine.execution.transfer import upload_columns
from engine.execution.triton_sampling.penalties import penalise_on_device
from engine.execution.triton_sampling.sampler import sample_on_device
from engine.execution.triton_sampling.tensors import PenaltyTensors, SamplingScratch, SamplingTensors


def choose_on_device(logits: Tensor, positions: Sequence[Position]) -> Tensor:
    """:func:`engine.execution.sampling.choose` in at most three launches. ``logits``: float32 ``[N, V]``, adjusted."""
    vocab, params = logits.shape[1], [p.params for p in positions]
    temperature, top_k, top_p, min_p, seeds, indices = upload_columns(
        (
            ([p.temperature for p in params], torch.float32),
            ([p.top_k if 0 < p.top_k < vocab else 0 for p in params], torch.int32),
            ([p.top_p for p in params], torch.float64),
            ([p.min_p for p in params], torch.float32),
            ([signed64(p.seed) for p in positions], torch.int64),
            ([p.index for p in positions], torch.int64),
        ),
        logits.device,
    )
    sampled = [p for p in params if p.temperature != 0.0]
    filtered = any(0 < p.top_k < vocab or p.top_p < 1.0 for p in sampled)
    tensors = SamplingTensors(temperature, top_k, top_p, min_p, seeds, indices, bool(sampled), filtered)
    return sample_on_device(logits, tensors, _scratch(1 << (len(positions) - 1).bit_length(), vocab, logits.device))


def penalise_rows(logits: Tensor, positions: Sequence[Position]) -> None:
    """Apply the penalties of all positions in place, in one launch. All have rows of one table."""
    rows = [p.row for p in positions if p.row is not None]
    assert len(rows) == len(positions) > 0, "the text of every position is in a table"
    table = rows[0].table
    params = [p.params for p in positions]
    slots, prompt_lens, ends, repetition, presence, frequency = upload_columns(
        (
            ([row.slot for row in rows], torch.int64),
            ([p.prompt_len for p in positions], torch.int64),
            ([len(p.history) + len(p.drafts) for p in positions], torch.int64),
            ([p.repetition_penalty for p in params], torch.float32),
            ([p.presence_penalty for p in params], torch.float32),
            ([p.frequency_penalty for p in params], torch.float32),
        ),
        logits.device,
    )
    penalise_on_device(logits, PenaltyTensors(table, slots, prompt_lens, ends, repetition, presence, frequency))


@cache
def _scratch(rows: int, vocab: int, device: torch.device) -> SamplingScratch:
    """One for each power of two of rows: a handful, and launches on one stream may share it."""
    return SamplingScratch.allocate(rows, vocab, device)
