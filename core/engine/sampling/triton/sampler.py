"""The launches that turn logits into tokens without asking the host."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from engine.kernels.torch.reference import NOT_FINITE
from engine.kernels.triton.device import has_dependent_launch
from engine.sampling.state import Feature, SamplingBatch
from engine.sampling.triton.border import find_border
from engine.sampling.triton.draw import draw
from engine.sampling.triton.survey import survey
from engine.sampling.triton.tensors import CHUNK, LIST_LENGTH, SamplingScratch

PROBES = 16
"""Keys tried in one pass of the border's search: it leaves at most a 17th of the interval."""
SEARCH_BLOCK = 1024
"""Tokens compared with all probes at once."""
SEARCH_WARPS = 8
"""Makes 64 comparisons a thread: ``PROBES * SEARCH_BLOCK`` for 256 threads."""


def sample_on_device(
    logits: Tensor, batch: SamplingBatch | None, ids: Tensor | None = None, broken: int = NOT_FINITE
) -> Tensor:
    """The token of every position, int64 ``[N]``: what :func:`engine.sampling.choose.choose` chooses.

    ``logits``: float32 ``[N, V]``, adjusted, rows contiguous; only read. ``batch``: ``None`` where all is greedy.
    ``ids``: int64 ``[V]``, the token each column stands for. Broken rows get the token ``broken``. Launches one kernel
    if all is greedy, two without top-k and top-p, else three; no synchronisation, grids depend on shapes alone: may be
    captured in a CUDA graph.
    """
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    chunks = triton.cdiv(vocab, CHUNK)
    # One for each power of two of rows: a handful, and launches on one stream may share it.
    scratch = _scratch(1 << (rows - 1).bit_length(), vocab, logits.device)
    capacity, stride = scratch.chunk_best.shape[0], logits.stride(0)
    arrived, length = scratch.counters
    if batch is not None and Feature.SAMPLED not in batch.features:
        batch = None
    filtered = batch is not None and Feature.FILTERED in batch.features
    columns: tuple[Tensor | None, ...] = (None, None, None, None)
    if batch is not None:
        columns = (batch.temperature, batch.top_k, batch.top_p, batch.min_p)
    pdl = has_dependent_launch(logits.device.type)
    grid, lanes = (rows, chunks), triton.next_power_of_2(chunks)
    shape = {"VOCAB": vocab, "CHUNK": CHUNK, "CHUNKS": chunks, "PDL": pdl}
    # No fusion: scaled logits must come out as they do without a kernel, or ties would break differently.
    options = {"enable_fp_fusion": False, **({"launch_pdl": True} if pdl else {})}
    survey[grid](
        logits, ids, *columns,
        scratch.chunk_best, scratch.chunk_index, scratch.chunk_mass, scratch.facts, arrived, tokens, capacity, stride,
        LANES=lanes, FILTERED=filtered, BROKEN=broken, num_warps=4, **shape, **options,
    )  # fmt: skip
    if filtered:
        find_border[grid](
            logits, *columns[:3], scratch.facts, scratch.listed, length, arrived,
            capacity, stride, LIST_LENGTH=LIST_LENGTH, PROBES=PROBES, BLOCK=SEARCH_BLOCK,
            num_warps=SEARCH_WARPS, **shape, **options,
        )  # fmt: skip
    if batch is not None:
        draw[grid](
            logits, ids, batch.temperature, batch.seeds, batch.output_index, scratch.facts,
            scratch.chunk_best, scratch.chunk_index, arrived, tokens, capacity, stride,
            LANES=lanes, num_warps=4, **shape, **options,
        )  # fmt: skip
    return tokens


@cache
def _scratch(rows: int, vocab: int, device: torch.device) -> SamplingScratch:
    return SamplingScratch.allocate(rows, vocab, device)
