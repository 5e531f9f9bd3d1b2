// Mixtures of experts for few tokens: which experts each token goes to, and one call after another on the weights of
// those that were chosen. Elements T are float or bfloat16; all arithmetic here is float32.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "element.h"

// Mirrored by a ctypes structure.
struct Choice {
    int64_t num_experts, top_k, in_features;
    const float* router;       // [num_experts, in_features]
    const float* router_bias;  // [num_experts] or null
    const float* correction;   // [num_experts] or null: added to scores where experts are chosen
    int64_t scores;            // see Scores
    int64_t renormalize, groups, chosen_groups, by_two;
    float scale;
    float* room;  // [2 * num_experts + groups]
};

enum Scores : int64_t { SOFTMAX = 0, SIGMOID = 1, LOGITS = 2 };

namespace {

constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr float SMALLEST_SUM = 1e-20f;

void softmax(float* x, int64_t count) {
    const float largest = *std::max_element(x, x + count);
    float sum = 0.0f;
    for (int64_t i = 0; i < count; i++) sum += x[i] = std::exp(x[i] - largest);
    for (int64_t i = 0; i < count; i++) x[i] /= sum;
}

// Of equals the first. Every value but NEVER can be taken, a NaN too.
int64_t take_largest(float* values, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++)
        if (values[i] > values[best] || std::isnan(values[i])) best = i;
    values[best] = NEVER;
    return best;
}

// Experts of other than the best groups cannot be taken.
void leave_best_groups(const Choice& c, float* choice, float* groups) {
    const int64_t size = c.num_experts / c.groups;
    for (int64_t group = 0; group < c.groups; group++) {
        float first = NEVER, second = NEVER;
        for (const float* score = choice + group * size; score < choice + (group + 1) * size; score++) {
            second = std::max(second, std::min(first, *score));
            first = std::max(first, *score);
        }
        groups[group] = c.by_two ? first + second : first;
    }
    uint64_t best = 0;
    for (int64_t k = 0; k < c.chosen_groups; k++) best |= uint64_t{1} << take_largest(groups, c.groups);
    for (int64_t group = 0; group < c.groups; group++)
        if (!(best >> group & 1)) std::fill_n(choice + group * size, size, NEVER);
}

template <typename T>
void choose(const Choice& c, int64_t rows, const T* x, int64_t x_stride, int64_t* ids, float* weights) {
    float *scores = c.room, *choice = c.room + c.num_experts;
    for (int64_t row = 0; row < rows; row++) {
        const T* in = x + row * x_stride;
        for (int64_t e = 0; e < c.num_experts; e++) {
            const float* weight = c.router + e * c.in_features;
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < c.in_features; i++) sum += widen(in[i]) * weight[i];
            scores[e] = c.router_bias ? sum + c.router_bias[e] : sum;
        }
        // Sigmoids of large logits are equal. Without a correction their order is that of the logits.
        const bool by_logits = c.scores == SIGMOID && !c.correction && c.groups == 1;
        if (by_logits) std::copy_n(scores, c.num_experts, choice);
        if (c.scores == SOFTMAX) softmax(scores, c.num_experts);
        if (c.scores == SIGMOID)
            for (int64_t e = 0; e < c.num_experts; e++) scores[e] = 1.0f / (1.0f + std::exp(-scores[e]));
        for (int64_t e = 0; e < c.num_experts && !by_logits; e++)
            choice[e] = c.correction ? scores[e] + c.correction[e] : scores[e];
        if (c.groups > 1) leave_best_groups(c, choice, choice + c.num_experts);
        int64_t* chosen = ids + row * c.top_k;
        float* share = weights + row * c.top_k;
        for (int64_t k = 0; k < c.top_k; k++) {
            chosen[k] = take_largest(choice, c.num_experts);
            share[k] = scores[chosen[k]];
        }
        if (c.scores == LOGITS) softmax(share, c.top_k);
        float sum = 0.0f;
        for (int64_t k = 0; k < c.top_k; k++) sum += share[k];
        const float factor = c.renormalize ? c.scale / (sum + SMALLEST_SUM) : c.scale;
        for (int64_t k = 0; k < c.top_k; k++) share[k] *= factor;
    }
}

using Function = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);

}  // namespace

// As in engine/native/calls.cpp.
struct Call {
    Function function;
    int64_t arguments[10];

    void make() const {
        const int64_t* a = arguments;
        function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]);
    }
};

// Mirrored by a ctypes structure. Calls are of one row: gate_up from `in` to their own room, down from there to `out`.
struct Experts {
    int64_t num_experts, top_k, in_features, out_features;
    const Call *gate_up, *down;  // [num_experts]
    void *in, *out;              // one row
    float* sums;                 // [rows, out_features]
};

namespace {

// y = sum of weight * expert(x) (+ residual): expert by expert, so that one that several tokens share is read from
// memory once.
template <typename T>
void mix(const Experts& m, int64_t rows, const T* x, int64_t x_stride, const int64_t* ids, const float* weights,
         const T* residual, T* y) {
    T *in = static_cast<T*>(m.in), *out = static_cast<T*>(m.out);
    std::fill_n(m.sums, rows * m.out_features, 0.0f);
    for (int64_t expert = 0; expert < m.num_experts; expert++)
        for (int64_t pair = 0; pair < rows * m.top_k; pair++) {
            if (ids[pair] != expert) continue;
            const int64_t row = pair / m.top_k;
            std::copy_n(x + row * x_stride, m.in_features, in);
            m.gate_up[expert].make();
            m.down[expert].make();
            float* sums = m.sums + row * m.out_features;
#pragma omp simd
            for (int64_t i = 0; i < m.out_features; i++) sums[i] += widen(out[i]) * weights[pair];
        }
    for (int64_t i = 0; i < rows * m.out_features; i++)
        y[i] = narrow<T>(residual ? widen(residual[i]) + widen(narrow<T>(m.sums[i])) : m.sums[i]);
}

}  // namespace

#define EXPORT(T)                                                                                                      \
    extern "C" void choose_experts_##T(const Choice* choice, int64_t rows, const T* x, int64_t x_stride, int64_t* ids, \
                                       float* weights) {                                                               \
        choose(*choice, rows, x, x_stride, ids, weights);                                                              \
    }                                                                                                                  \
    extern "C" void mix_experts_##T(const Experts* experts, int64_t rows, const T* x, int64_t x_stride,                \
                                    const int64_t* ids, const float* weights, const T* residual, T* y) {               \
        mix(*experts, rows, x, x_stride, ids, weights, residual, y);                                                   \
    }

EXPORT(float)
EXPORT(bfloat16)
