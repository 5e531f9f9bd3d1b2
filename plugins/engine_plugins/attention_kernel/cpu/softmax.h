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
constexpr float MASKED = -1e30f;
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
        store(column_max(), broadcast(NO_MAXIMUM));
    }

    // Multiply sums and output.
    void rescale(vec factor, int64_t dims) const {
        for (int64_t i = 1; i < dims + 2; i++) store(memory + i * LANES, load(memory + i * LANES) * factor);
    }

    // Add what was seen of the same columns in another split.
    void merge(StripState other, int64_t dims) const {
        const vec mine = load(column_max()), theirs = load(other.column_max()), both = maximum(mine, theirs);
        const vec my_factor = exp2_vec(mine - both), their_factor = exp2_vec(theirs - both);
        store(column_max(), both);
        for (int64_t i = 1; i < dims + 2; i++) {
            float* at = memory + i * LANES;
            store(at, load(at) * my_factor + load(other.memory + i * LANES) * their_factor);
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
    for (int64_t key = begin; key < end; key++) {
        float* at = scores + key * LANES;
        store(at, tanh_vec(load(at) * factor));
    }
}

// Mask what lies after each column's last key or before its window.
void apply_mask(const Op& op, const int32_t* last_keys, int64_t first_key, float* scores, int64_t begin, int64_t end) {
    ivec last;
    std::memcpy(&last, last_keys, sizeof last);
    const ivec before = op.window > 0 ? last - static_cast<int32_t>(op.window) : ivec{} - 1;
    for (int64_t i = begin; i < end; i++) {
        const ivec key = ivec{} + static_cast<int32_t>(first_key + i);
        const vec score = load(scores + i * LANES);
        store(scores + i * LANES, (key > last) | (key <= before) ? broadcast(MASKED) : score);
    }
}

vec largest_scores(const float* scores, float factor, int64_t begin, int64_t end) {
    constexpr int CHAINS = 4;
    vec largest[CHAINS];
    for (vec& one : largest) one = broadcast(NO_MAXIMUM);
    for (int64_t key = begin; key < end; key += CHAINS)
        for (int i = 0; i < CHAINS; i++) largest[i] = maximum(largest[i], load(scores + (key + i) * LANES) * factor);
    return maximum(maximum(largest[0], largest[1]), maximum(largest[2], largest[3]));
}

// The probabilities of keys `begin` up to, not including, `end`, relative to the largest score so far, by
// put_probs(key, probabilities of key, probabilities of key + 1).
template <class PutProbs>
void softmax_strip(const float* scores, StripState state, float factor, int64_t dims, int64_t begin, int64_t end,
                   PutProbs put_probs) {
    const vec before = load(state.column_max());
    const vec largest = maximum(before, largest_scores(scores, factor, begin, end));
    if (any_differs(before, largest)) {
        state.rescale(exp2_vec(before - largest), dims);
        store(state.column_max(), largest);
    }
    vec even = load(state.column_sum()), odd = {};
    for (int64_t key = begin; key < end; key += 2) {
        const vec first = exp2_vec(load(scores + key * LANES) * factor - largest);
        const vec second = exp2_vec(load(scores + (key + 1) * LANES) * factor - largest);
        even += first;
        odd += second;
        put_probs(key, first, second);
    }
    store(state.column_sum(), even + odd);
}

}  // namespace
