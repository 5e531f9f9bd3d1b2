"""Last launch: the Gumbel maximum over the tokens that survived the filters."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.arrival import arrive
from engine.kernels.triton.tile_ops import start_dependents, wait_for_input
from engine.sampling import philox
from engine.sampling.triton.noise import gumbel, gumbel_of
from engine.sampling.triton.survey import BORDER, LARGEST

_SAMPLE = tl.constexpr(philox.SAMPLE)


@triton.jit(
    do_not_specialize=["capacity"],
    do_not_specialize_on_alignment=[
        "ids_ptr", "temperature_ptr", "seed_ptr", "position_ptr", "facts_ptr", "best_ptr", "index_ptr", "arrived_ptr",
        "token_ptr",
    ],
)  # fmt: skip
def draw(
    logits_ptr, ids_ptr, temperature_ptr, seed_ptr, position_ptr, facts_ptr, best_ptr, index_ptr, arrived_ptr,
    token_ptr, capacity, stride,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program ``(row, chunk)``; the row's last one writes its token. Rows with a border of +inf have theirs. Column
    ``i`` is, and has the noise of, token ``ids[i]``, without ``ids`` token ``i``."""
    start_dependents(PDL)
    wait_for_input(PDL)
    row, chunk = tl.program_id(0), tl.program_id(1)
    border = tl.load(facts_ptr + BORDER * capacity + row)
    if border == float("inf"):
        return
    largest = tl.load(facts_ptr + LARGEST * capacity + row)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + at, mask=at < VOCAB, other=float("-inf"))
    scaled = tl.math.div_rn(x - largest, tl.load(temperature_ptr + row))
    best, index = float("-inf"), VOCAB
    if tl.max(scaled, 0) >= border:  # most chunks of a filtered row have nobody to draw for
        seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
        if ids_ptr is not None:
            noise = gumbel_of(seed, position, tl.load(ids_ptr + at, mask=at < VOCAB, other=0), _SAMPLE)
        else:
            noise = gumbel(seed, position, chunk * CHUNK, _SAMPLE, CHUNK)
        score = tl.where(scaled >= border, scaled + noise, float("-inf"))
        best = tl.max(score, 0)
        index = tl.min(tl.where(score == best, at, VOCAB), 0)
    tl.store(best_ptr + row * CHUNKS + chunk, best)
    tl.store(index_ptr + row * CHUNKS + chunk, index)
    if arrive(arrived_ptr + row) == CHUNKS - 1:
        tl.store(arrived_ptr + row, 0)
        lane = tl.arange(0, LANES)
        slot = row * CHUNKS + lane
        bests = tl.load(best_ptr + slot, mask=lane < CHUNKS, other=float("-inf"), cache_modifier=".cg")
        indices = tl.load(index_ptr + slot, mask=lane < CHUNKS, other=VOCAB, cache_modifier=".cg")
        token = tl.min(tl.where(bests == tl.max(bests, 0), indices, VOCAB), 0).to(tl.int64)
        if ids_ptr is not None:
            token = tl.load(ids_ptr + token, mask=token < VOCAB, other=0)
        tl.store(token_ptr + row, token)
