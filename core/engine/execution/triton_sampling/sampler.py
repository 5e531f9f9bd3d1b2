"""The launches that turn logits into tokens without asking the host."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from engine.execution.triton_ops.device import has_dependent_launch
from engine.execution.triton_sampling.border import find_border
from engine.execution.triton_sampling.draw import draw
from engine.execution.triton_sampling.survey import survey
from engine.execution.triton_sampling.tensors import CHUNK, LIST_LENGTH, SamplingScratch, SamplingTensors

PROBES = 16
"""Keys tried in one pass of the border's search: it leaves at most a 17th of the interval."""
SEARCH_BLOCK = 1024
"""Tokens compared with all probes at once."""
SEARCH_WARPS = 8
"""Makes 64 comparisons a thread: ``PROBES * SEARCH_BLOCK`` for 256 threads."""


def sample_on_device(logits: Tensor, params: SamplingTensors, scratch: SamplingScratch | None = None) -> Tensor:
    """The token of every position, int64 ``[N]``: what :func:`engine.execution.sampling.choose` chooses.

    ``logits``: float32 ``[N, V]``, adjusted, rows contiguous; only read. Broken rows get ``NOT_FINITE`` (-1). Launches
    one kernel if all is greedy, two without top-k and top-p, else three; no synchronisation, grids depend on shapes
    alone: may be captured in a CUDA graph. ``scratch`` (for at least ``N`` rows of this vocabulary) spares the
    allocations.
    """
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    chunks = triton.cdiv(vocab, CHUNK)
    if scratch is None:
        scratch = SamplingScratch.allocate(rows, vocab, logits.device)
    assert scratch.chunk_best.shape[0] >= rows and scratch.chunk_best.shape[1] == chunks
    capacity, stride = scratch.chunk_best.shape[0], logits.stride(0)
    arrived, length = scratch.counters
    filtered = params.sampled and params.filtered
    pdl = has_dependent_launch(logits.device.type)
    grid, lanes = (rows, chunks), triton.next_power_of_2(chunks)
    shape = {"VOCAB": vocab, "CHUNK": CHUNK, "CHUNKS": chunks, "PDL": pdl}
    # No fusion: scaled logits must come out as they do without a kernel, or ties would break differently.
    options = {"enable_fp_fusion": False, **({"launch_pdl": True} if pdl else {})}
    survey[grid](
        logits, params.temperature, params.top_k, params.top_p, params.min_p,
        scratch.chunk_best, scratch.chunk_index, scratch.chunk_mass, scratch.facts, arrived, tokens, capacity, stride,
        LANES=lanes, FILTERED=filtered, num_warps=4, **shape, **options,
    )  # fmt: skip
    if filtered:
        find_border[grid](
            logits, params.temperature, params.top_k, params.top_p, scratch.facts, scratch.listed, length, arrived,
            capacity, stride, LIST_LENGTH=LIST_LENGTH, PROBES=PROBES, BLOCK=SEARCH_BLOCK,
            num_warps=SEARCH_WARPS, **shape, **options,
        )  # fmt: skip
    if params.sampled:
        draw[grid](
            logits, params.temperature, params.seeds, params.positions, scratch.facts,
            scratch.chunk_best, scratch.chunk_index, arrived, tokens, capacity, stride,
            LANES=lanes, num_warps=4, **shape, **options,
        )  # fmt: skip
    return tokens
