"""First launch: the largest logit of every row, hence the greedy token, and what the later launches start from."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.arrival import arrive
from engine.kernels.triton.tile_ops import start_dependents, wait_for_input
from engine.sampling.philox import GUMBEL_SPAN
from engine.sampling.triton.noise import log

LARGEST = tl.constexpr(0)
BORDER = tl.constexpr(1)
ESTIMATE = tl.constexpr(2)
NORMALISER = tl.constexpr(3)
_SPAN = tl.constexpr(GUMBEL_SPAN)


@triton.jit(
    do_not_specialize=["capacity"],
    do_not_specialize_on_alignment=[
        "ids_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "best_ptr", "index_ptr", "mass_ptr",
        "facts_ptr", "arrived_ptr", "token_ptr",
    ],
)  # fmt: skip
def survey(
    logits_ptr, ids_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    best_ptr, index_ptr, mass_ptr, facts_ptr, arrived_ptr, token_ptr, capacity, stride,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr,
    FILTERED: tl.constexpr, BROKEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program ``(row, chunk)``; the row's last one writes its token (greedy, ``BROKEN`` if it is) and its facts. Column
    ``i`` is token ``ids[i]``, without ``ids`` token ``i``. Without temperatures all rows are greedy, and have no facts.

    Facts: ``BORDER`` is +inf where nothing is to be drawn, else the border without top-k and top-p. ``ESTIMATE`` is a
    scaled logit that the border of top-k and top-p cannot be below, or +inf without these filters. ``facts_ptr``:
    float32 ``[4, capacity]``, rows of the scratch and not of the batch.
    """
    start_dependents(PDL)
    wait_for_input(PDL)
    row, chunk = tl.program_id(0), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + at, mask=at < VOCAB, other=float("-inf"))
    # Maxima skip NaN: one makes the chunk's largest, so the row's, +inf, which is as broken.
    broken = tl.max((x != x).to(tl.int32), 0) > 0
    largest = tl.where(broken, float("inf"), tl.max(x, 0))
    slot = row * CHUNKS + chunk
    tl.store(best_ptr + slot, largest)
    tl.store(index_ptr + slot, tl.min(tl.where(x == largest, at, VOCAB), 0))
    if FILTERED:
        usable = (largest > float("-inf")) & (largest < float("inf"))
        temperature = tl.load(temperature_ptr + row)
        away = tl.where(usable, x, float("-inf")) - tl.where(usable, largest, 0.0)
        tl.store(mass_ptr + slot, tl.sum(tl.exp(away / tl.where(temperature > 0.0, temperature, 1.0)), 0))
    if arrive(arrived_ptr + row) == CHUNKS - 1:
        tl.store(arrived_ptr + row, 0)
        lane = tl.arange(0, LANES)
        bests = tl.load(best_ptr + row * CHUNKS + lane, mask=lane < CHUNKS, other=float("-inf"), cache_modifier=".cg")
        indices = tl.load(index_ptr + row * CHUNKS + lane, mask=lane < CHUNKS, other=VOCAB, cache_modifier=".cg")
        largest = tl.max(bests, 0)
        finite = (largest > float("-inf")) & (largest < float("inf"))
        token = tl.min(tl.where(bests == largest, indices, VOCAB), 0).to(tl.int64)
        if ids_ptr is not None:
            token = tl.load(ids_ptr + token, mask=finite, other=0)
        tl.store(token_ptr + row, tl.where(finite, token, BROKEN))
        if temperature_ptr is not None:
            _store_facts(
                bests, largest, finite, temperature_ptr + row, top_k_ptr + row, top_p_ptr + row, min_p_ptr + row,
                mass_ptr + row * CHUNKS, facts_ptr + row, capacity, VOCAB, CHUNKS, LANES, FILTERED,
            )  # fmt: skip


@triton.jit
def _store_facts(
    bests, largest, finite, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, mass_ptr, facts_ptr, capacity,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, FILTERED: tl.constexpr,
):  # fmt: skip
    """What the later launches start from, of a row whose chunks have these best logits."""
    lane = tl.arange(0, LANES)
    temperature, min_p = tl.load(temperature_ptr), tl.load(min_p_ptr)
    drawn = finite & (temperature > 0.0)
    # What lies further below the largest than noise can lift is left out: exact, and spares the noise.
    border = tl.where(min_p > 0.0, tl.maximum(log(tl.where(min_p > 0.0, min_p, 1.0)), -_SPAN), -_SPAN)
    tl.store(facts_ptr + LARGEST * capacity, largest)
    tl.store(facts_ptr + BORDER * capacity, tl.where(drawn, border, float("inf")))
    if FILTERED:
        top_k, top_p = tl.load(top_k_ptr).to(tl.int32), tl.load(top_p_ptr).to(tl.float32)
        ranked = (top_k > 0) & (top_k < VOCAB)
        estimate = float("inf")
        if drawn & (ranked | (top_p < 1.0)):
            divisor = tl.where(temperature > 0.0, temperature, 1.0)
            masses = tl.load(mass_ptr + lane, mask=lane < CHUNKS, other=0.0, cache_modifier=".cg")
            normaliser = tl.sum(masses * tl.exp((bests - largest) / divisor), 0)
            tl.store(facts_ptr + NORMALISER * capacity, normaliser)
            if ranked:
                # The k largest tokens are no lower than the k largest of the chunks' best.
                order = tl.sort(bests, descending=True)
                kth = tl.max(tl.where(lane == top_k - 1, order, float("-inf")), 0)
                estimate = tl.where(top_k <= CHUNKS, tl.math.div_rn(kth - largest, divisor), float("-inf"))
            else:
                # If all tokens were as likely as this, they could weigh only half of what top-p leaves out.
                left_out = tl.maximum(1.0 - top_p, 1e-8) * 0.5
                estimate = log(left_out * normaliser / VOCAB)
        tl.store(facts_ptr + ESTIMATE * capacity, estimate)
