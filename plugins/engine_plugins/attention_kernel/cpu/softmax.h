// The softmax of a strip as its keys come by, a chunk at a time (FlashAttention's online softmax).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "call.h"
#include "vectors.h"

namespace {

// Score of a key that a column does not see. A column that has seen no other keys yet has this as its maximum, and
// their probabilities are 1: the first key it does see raises the maximum, and rescaling removes them (by a factor of
// 0, or 2^-126 without AVX-512). Each column sees at least one key, if not in this split, so none of them remain.
// A power of two: its product with the scale is exact, so it equals the maximum also where a compiler fuses the product
// with the difference. Of a rounded product the difference would be 10^21: an infinite probability.
constexpr float MASKED = -0x1p100f;
constexpr float NO_MAXIMUM = -std::numeric_limits<float>::max();

// What has been seen of a strip: by column, the maximum and the sum of the softmax, and the output not yet divided by
// the sum. Exponents are base 2.
struct StripState {
    float* memory;  // [2 + dims][LANES]

    static int64_t floats(int64_t dims) { return (2 + dims) * LANES; }

    float* column_max() const { return memory; }
    float* column_sum() const { return memory + LANES; }
    float* out() const { return memory + 2 * LANES; }

    void clear(int64_t dims) const {
        std::fill_n(memory, floats(dims), 0.0f);
        std::fill_n(column_max(), LANES, NO_MAXIMUM);
    }

    // Multiply part p of sums and output.
    void rescale(int p, part factor, int64_t dims) const {
        for (int64_t i = 1; i < dims + 2; i++) {
            float* at = memory + i * LANES + p * PART_LANES;
            store_part(at, load_part(at) * factor);
        }
    }

    // Add what was seen of the same columns in another split.
    void merge(StripState other, int64_t dims) const {
        for (int p = 0; p < PARTS; p++) merge_part(p * PART_LANES, other, dims);
    }

    // Divide the output by the sums.
    void divide(int64_t dims) const {
        for (int p = 0; p < PARTS; p++) rescale(p, 1.0f / load_part(column_sum() + p * PART_LANES), dims);
    }

   private:
    void merge_part(int64_t lane, StripState other, int64_t dims) const {
        const part mine = load_part(column_max() + lane), theirs = load_part(other.column_max() + lane);
        const part both = maximum(mine, theirs);
        const part my_factor = exp2_part(mine - both), their_factor = exp2_part(theirs - both);
        store_part(column_max() + lane, both);
        for (int64_t i = 1; i < dims + 2; i++) {
            float* at = memory + i * LANES + lane;
            const part sum = load_part(other.memory + i * LANES + lane) * their_factor;
            store_part(at, load_part(at) * my_factor + sum);
        }
    }
};

// What is left of the scaling: a probability is 2^(score * factor - maximum), to be divided by the sum. Soft-capped
// scores are in units of the cap.
float exponent_factor(const Op& op) { return (op.soft_cap > 0 ? op.soft_cap : op.scale) * LOG2_E; }

// Each key's scores with its scale.
void scale_scores(const float* scales, float* scores, int64_t begin, int64_t end) {
    for (int64_t key = begin; key < end; key++) {
        float* at = scores + key * LANES;
        store(at, load(at) * scales[key]);
    }
}

void apply_soft_cap(const Op& op, float* scores, int64_t begin, int64_t end) {
    const float factor = op.scale / op.soft_cap;
    for (float* at = scores + begin * LANES; at < scores + end * LANES; at += PART_LANES)
        store_part(at, tanh_part(load_part(at) * factor));
}

// The keys before the first ones that queries at these positions see, as Op::first_key.
ipart before_first(const Op& op, ipart positions) {
    if (op.chunk > 0) return positions - positions % static_cast<int32_t>(op.chunk) - 1;
    return op.window > 0 ? positions - static_cast<int32_t>(op.window) : ipart{} - 1;
}

// Mask what lies after each column's last key or before its first.
void apply_mask(const Op& op, const int32_t* last_keys, int64_t first_key, float* scores, int64_t begin, int64_t end) {
    for (int p = 0; p < PARTS; p++) {
        ipart last;
        std::memcpy(&last, last_keys + p * PART_LANES, sizeof last);
        const ipart before = before_first(op, last);
        for (int64_t i = begin; i < end; i++) {
            float* at = scores + i * LANES + p * PART_LANES;
            const ipart key = ipart{} + static_cast<int32_t>(first_key + i);
            store_part(at, (key > last) | (key <= before) ? broadcast_part(MASKED) : load_part(at));
        }
    }
}

// Scores of a part: of keys LANES elements apart.
part largest_scores(const float* scores, float factor, int64_t begin, int64_t end) {
    constexpr int CHAINS = 4;
    part largest[CHAINS];
    for (part& one : largest) one = broadcast_part(NO_MAXIMUM);
    for (int64_t key = begin; key < end; key += CHAINS)
        for (int i = 0; i < CHAINS; i++)
            largest[i] = maximum(largest[i], load_part(scores + (key + i) * LANES) * factor);
    return maximum(maximum(largest[0], largest[1]), maximum(largest[2], largest[3]));
}

// The probabilities of keys `begin` up to, not including, `end` in part p, relative to the largest score so far, by
// put_probs(key, probabilities of key, probabilities of key + 1).
template <class PutProbs>
void softmax_part(int p, const float* scores, StripState state, float factor, int64_t dims, int64_t begin, int64_t end,
                  PutProbs put_probs) {
    scores += p * PART_LANES;
    float *column_max = state.column_max() + p * PART_LANES, *column_sum = state.column_sum() + p * PART_LANES;
    const part before = load_part(column_max);
    const part largest = maximum(before, largest_scores(scores, factor, begin, end));
    if (any_differs(before, largest)) {
        state.rescale(p, exp2_part(before - largest), dims);
        store_part(column_max, largest);
    }
    part even = load_part(column_sum), odd = {};
    for (int64_t key = begin; key < end; key += 2) {
        const part first = exp2_part(load_part(scores + key * LANES) * factor - largest);
        const part second = exp2_part(load_part(scores + (key + 1) * LANES) * factor - largest);
        even += first;
        odd += second;
        put_probs(key, first, second);
    }
    store_part(column_sum, even + odd);
}

}  // namespace
