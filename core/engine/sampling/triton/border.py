"""Second launch, only with top-k or top-p: the border of each row, without a sort.

All programs of a row collect the few tokens above the survey's estimate. The last one then finds the border among
these by multi-way bisection of its bit pattern: scaled logits are at most 0, so the bits of their absolute value
are integers that count upwards from the likeliest token. Eight passes a filter settle all 31 bits, ties included.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.arrival import arrive
from engine.kernels.triton.tile_ops import start_dependents, wait_for_input
from engine.sampling.triton.survey import BORDER, ESTIMATE, LARGEST, NORMALISER

ONE = tl.constexpr(2.0**40)
"""Fixed point of masses: integers add up to the same in any order, and a vocabulary of a million fits 63 bits."""


@triton.jit(
    do_not_specialize=["capacity"],
    do_not_specialize_on_alignment=[
        "temperature_ptr", "top_k_ptr", "top_p_ptr", "facts_ptr", "length_ptr", "arrived_ptr",
    ],
)  # fmt: skip
def find_border(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, facts_ptr, listed_ptr, length_ptr, arrived_ptr, capacity, stride,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, LIST_LENGTH: tl.constexpr,
    PROBES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program ``(row, chunk)``. Raises ``BORDER`` of the rows whose ``ESTIMATE`` is not +inf."""
    start_dependents(PDL)
    wait_for_input(PDL)
    row, chunk = tl.program_id(0), tl.program_id(1)
    estimate = tl.load(facts_ptr + ESTIMATE * capacity + row)
    if estimate == float("inf"):
        return
    largest = tl.load(facts_ptr + LARGEST * capacity + row)
    temperature = tl.load(temperature_ptr + row)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    row_logits = logits_ptr + row.to(tl.int64) * stride
    x = tl.load(row_logits + at, mask=at < VOCAB, other=float("-inf"))
    scaled = tl.math.div_rn(x - largest, temperature)
    above = ((scaled >= estimate) & (at < VOCAB)).to(tl.int32)
    row_list = listed_ptr + row.to(tl.int64) * LIST_LENGTH
    # In which order programs get their places is open; what is taken of the list does not depend on it: counts, and
    # sums in fixed point.
    place = tl.atomic_add(length_ptr + row, tl.sum(above, 0), sem="relaxed") + tl.cumsum(above, 0) - 1
    tl.store(row_list + place, scaled, mask=(above > 0) & (place < LIST_LENGTH))
    if arrive(arrived_ptr + row) == CHUNKS - 1:
        tl.store(arrived_ptr + row, 0)
        length = tl.load(length_ptr + row, cache_modifier=".cg")
        source, shift, divisor = row_list, 0.0, 1.0
        if length > LIST_LENGTH:
            source, length, shift, divisor = row_logits, VOCAB, largest, temperature
        border = _settle(
            source, length, shift, divisor,
            tl.load(top_k_ptr + row).to(tl.int32), tl.load(top_p_ptr + row).to(tl.float64), estimate,
            tl.load(facts_ptr + NORMALISER * capacity + row).to(tl.float64) * ONE, VOCAB, PROBES, BLOCK,
        )  # fmt: skip
        tl.store(length_ptr + row, 0)
        border_ptr = facts_ptr + BORDER * capacity + row
        tl.store(border_ptr, tl.maximum(tl.load(border_ptr), border))


@triton.jit
def _settle(
    source, length, shift, divisor, top_k, top_p, estimate, normaliser,
    VOCAB: tl.constexpr, PROBES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The border of top-k, then of top-p within what top-k leaves: a scaled logit."""
    highest = tl.abs(estimate).to(tl.int32, bitcast=True)
    if (top_k > 0) & (top_k < VOCAB):
        highest = _lowest_key(source, length, shift, divisor, top_k, highest, False, PROBES, BLOCK)
        kept = _weigh(source, length, shift, divisor, tl.full([PROBES], 0, tl.int32) + highest, True, PROBES, BLOCK)
        normaliser = tl.max(kept, 0).to(tl.float64)
    if top_p < 1.0:
        target = (top_p * normaliser).to(tl.int64)
        highest = _lowest_key(source, length, shift, divisor, target, highest, True, PROBES, BLOCK)
    return -highest.to(tl.float32, bitcast=True)


@triton.jit
def _lowest_key(
    source, length, shift, divisor, target, high,
    BY_MASS: tl.constexpr, PROBES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The smallest key in ``0 .. high`` up to which tokens number (or weigh) at least ``target``; else ``high``."""
    low = 0
    while low < high:
        step = (high - low) // (PROBES + 1) + 1
        probes = low + (tl.arange(0, PROBES) + 1) * step - 1
        enough = (_weigh(source, length, shift, divisor, probes, BY_MASS, PROBES, BLOCK) >= target) | (probes >= high)
        # Weights only grow with the key, so the probes that fall short are the first ones.
        low = low + tl.sum(1 - enough.to(tl.int32), 0) * step
        high = tl.minimum(high, low + step - 1)
    return high


@triton.jit
def _weigh(
    source, length, shift, divisor, probes,
    BY_MASS: tl.constexpr, PROBES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Number (int32), or sum of ``exp(scaled)`` in units of ``1 / ONE`` (int64), of the tokens up to each key."""
    if BY_MASS:
        found = tl.zeros([PROBES], tl.int64)
    else:
        found = tl.zeros([PROBES], tl.int32)
    for begin in range(0, length, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(source + at, mask=at < length, other=float("-inf"), cache_modifier=".cg")
        scaled = tl.math.div_rn(x - shift, divisor)
        key = tl.abs(scaled).to(tl.int32, bitcast=True)
        inside = (key[None, :] <= probes[:, None]) & (at < length)[None, :]
        if BY_MASS:
            mass = (tl.exp(scaled) * ONE).to(tl.int64)
            found += tl.sum(tl.where(inside, mass[None, :], 0), 1)
        else:
            found += tl.sum(inside.to(tl.int32), 1)
    return found
