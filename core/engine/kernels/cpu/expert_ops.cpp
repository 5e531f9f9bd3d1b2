// Mixtures of experts: which experts each token goes to, and what those make of it. Elements T are float or bfloat16;
// all arithmetic here is float32.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "activations.h"
#include "element.h"
#include "thread_pool.h"
#include "thread_scratch.h"

// Mirrored by a ctypes structure.
struct Choice {
    int64_t num_experts, top_k, in_features;
    const float* router;       // [num_experts, in_features]
    const float* router_bias;  // [num_experts] or null
    const float* correction;   // [num_experts] or null: added to scores where experts are chosen
    const float* expert_scale;  // [num_experts] or null: multiplies weights of these experts
    int64_t scores;            // see Scores
    int64_t renormalize, groups, chosen_groups, by_two;
    float scale;

    int64_t room() const { return 2 * num_experts + groups; }  // floats for a token
};

enum Scores : int64_t { SOFTMAX = 0, SIGMOID = 1, LOGITS = 2 };

namespace {

constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr float SMALLEST_SUM = 1e-20f;
constexpr int64_t TILE = 4;  // tokens and experts whose products are summed together

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

// Logits of ROWS tokens and EXPERTS experts: each the same sum whatever its neighbours.
template <int ROWS, int EXPERTS, typename T>
void score_tile(const Choice& c, const T* x, int64_t x_stride, int64_t expert, float* scores) {
    const float* router = c.router + expert * c.in_features;
    part sums[ROWS][EXPERTS] = {};
    const int64_t whole = c.in_features / PART_LANES * PART_LANES;
    for (int64_t i = 0; i < whole; i += PART_LANES) {
        part weights[EXPERTS];
#pragma GCC unroll 4
        for (int e = 0; e < EXPERTS; e++) weights[e] = load_part(router + e * c.in_features + i);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            const part in = widen_part(x + r * x_stride + i);
#pragma GCC unroll 4
            for (int e = 0; e < EXPERTS; e++) sums[r][e] += in * weights[e];
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int e = 0; e < EXPERTS; e++) {
            float sum = 0.0f;
            for (int lane = 0; lane < PART_LANES; lane++) sum += sums[r][e][lane];
            for (int64_t i = whole; i < c.in_features; i++)
                sum += widen(x[r * x_stride + i]) * router[e * c.in_features + i];
            scores[r * c.room() + e] = c.router_bias ? sum + c.router_bias[expert + e] : sum;
        }
}

// room: [rows][c.room()], of which scores of experts come first
template <typename T>
void score(const Choice& c, int64_t rows, const T* x, int64_t x_stride, float* room) {
    const int64_t across = (c.num_experts + TILE - 1) / TILE, tiles = (rows + TILE - 1) / TILE * across;
    parallel_for(tiles, rows * c.num_experts * c.in_features, [&](int64_t tile) {
        const int64_t row = tile / across * TILE, expert = tile % across * TILE;
        const T* in = x + row * x_stride;
        float* scores = room + row * c.room() + expert;
        const int64_t height = std::min(TILE, rows - row), width = std::min(TILE, c.num_experts - expert);
        if (height == TILE && width == TILE) return score_tile<TILE, TILE>(c, in, x_stride, expert, scores);
        for (int64_t r = 0; r < height; r++)
            if (width == TILE)
                score_tile<1, TILE>(c, in + r * x_stride, x_stride, expert, scores + r * c.room());
            else
                for (int64_t e = 0; e < width; e++)
                    score_tile<1, 1>(c, in + r * x_stride, x_stride, expert + e, scores + r * c.room() + e);
    });
}

// scores: [c.room()]
void choose(const Choice& c, float* scores, int64_t* chosen, float* share) {
    float* choice = scores + c.num_experts;
    // Sigmoids of large logits are equal. Without a correction their order is that of the logits.
    const bool by_logits = c.scores == SIGMOID && !c.correction && c.groups == 1;
    if (by_logits) std::copy_n(scores, c.num_experts, choice);
    if (c.scores == SOFTMAX) softmax(scores, c.num_experts);
    if (c.scores == SIGMOID)
        for (int64_t e = 0; e < c.num_experts; e++) scores[e] = 1.0f / (1.0f + std::exp(-scores[e]));
    for (int64_t e = 0; e < c.num_experts && !by_logits; e++)
        choice[e] = c.correction ? scores[e] + c.correction[e] : scores[e];
    if (c.groups > 1) leave_best_groups(c, choice, choice + c.num_experts);
    for (int64_t k = 0; k < c.top_k; k++) {
        chosen[k] = take_largest(choice, c.num_experts);
        share[k] = scores[chosen[k]];
    }
    if (c.scores == LOGITS) softmax(share, c.top_k);
    float sum = 0.0f;
    for (int64_t k = 0; k < c.top_k; k++) sum += share[k];
    const float factor = c.renormalize ? c.scale / (sum + SMALLEST_SUM) : c.scale;
    for (int64_t k = 0; k < c.top_k; k++) share[k] *= c.expert_scale ? factor * c.expert_scale[chosen[k]] : factor;
}

template <typename T>
void choose_experts(const Choice& c, int64_t rows, const T* x, int64_t x_stride, int64_t* ids, float* weights,
                    float* room) {
    score(c, rows, x, x_stride, room);
    parallel_for(rows, rows * c.num_experts * c.top_k, [&](int64_t row) {
        choose(c, room + row * c.room(), ids + row * c.top_k, weights + row * c.top_k);
    });
}

using Function = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);

}  // namespace

// As in engine/native/calls.cpp.
struct Call {
    Function function;
    int64_t arguments[10];
};

// Calls of one kind of layer, of each expert. Mirrored by a ctypes structure.
struct Layers {
    const Call* calls;      // [num_experts]
    int64_t rows, in, out;  // which arguments are the number of rows and the addresses of input and output
    int64_t in_stride, out_stride;

    template <typename T>
    void make(int64_t expert, int64_t count, const T* x, T* y) const {
        int64_t a[10];
        std::copy_n(calls[expert].arguments, 10, a);
        a[rows] = count, a[in] = reinterpret_cast<int64_t>(x), a[out] = reinterpret_cast<int64_t>(y);
        calls[expert].function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]);
    }
};

// Mirrored by a ctypes structure.
struct Experts {
    int64_t num_experts, top_k, in_features, inner_features, out_features;
    Layers gate_up, down;
    // Of gates and ups that gate_up leaves one after another; with NONE it leaves act(gate) * up.
    int64_t activation;
    float limit, alpha, offset;
    int32_t weighs_inputs;  // weights multiply what experts read, not what they make
};

namespace {

constexpr int64_t MOST_ROWS = 256;  // of an expert at a time: what is computed of them stays in a second-level cache

// Rows of an expert: places begin .. end among pairs of tokens and experts, ordered by expert.
struct Share {
    int64_t expert, begin, end;
};

// order: pairs by expert, of one expert by token; those of expert -1, which is not here, are left out. Returns how many
// shares there are.
int64_t divide(const Experts& m, int64_t pairs, const int64_t* ids, int32_t* order, Share* shares) {
    int64_t count = 0, place = 0;
    int64_t* starts = static_cast<int64_t*>(std::calloc(m.num_experts + 1, sizeof(int64_t)));
    if (starts == nullptr) std::abort();
    for (int64_t pair = 0; pair < pairs; pair++)
        if (ids[pair] >= 0) starts[ids[pair] + 1]++;
    for (int64_t expert = 0; expert < m.num_experts; expert++) {
        for (int64_t left = starts[expert + 1]; left > 0; left -= std::min(left, MOST_ROWS)) {
            const int64_t end = place + std::min(left, MOST_ROWS);
            shares[count++] = {expert, place, end};
            place = end;
        }
        starts[expert + 1] = place;
    }
    for (int64_t pair = 0; pair < pairs; pair++)
        if (ids[pair] >= 0) order[starts[ids[pair]]++] = pair;
    std::free(starts);
    return count;
}

// [2 * size] gates and ups -> act(gate) * (up + offset), with gates cut from above and ups from both sides
template <typename T>
void gate(const Experts& m, const T* both, T* y) {
    const int64_t size = m.inner_features;
    for (int64_t begin = 0; begin < size; begin += PART_LANES) {
        const int64_t count = std::min<int64_t>(PART_LANES, size - begin);
        T in[2][PART_LANES] = {}, out[PART_LANES];
        std::copy_n(both + begin, count, in[0]);
        std::copy_n(both + size + begin, count, in[1]);
        const part limit = broadcast_part(m.limit);
        part gates = widen_part(in[0]), ups = widen_part(in[1]);
        gates = gates > limit ? limit : gates;
        ups = ups > limit ? limit : ups < -limit ? -limit : ups;
        const part acts = m.activation == SILU ? over_one_plus_exp2(gates, gates * (-LOG2_E * m.alpha)) : gelu_tanh(gates);
        narrow_part(out, acts * (ups + m.offset));
        std::copy_n(out, count, y + begin);
    }
}

// y = sum of weight * expert(x), or expert(weight * x), (+ residual): expert by expert, so that one that several tokens share is read from
// memory once.
template <typename T>
class Mixture {
public:
    // order: [2][pairs], made: [pairs][out_features]
    Mixture(const Experts& m, int64_t rows, const T* x, int64_t x_stride, int32_t* order, T* made)
        : m_(m), pairs_(rows * m.top_k), x_(x), x_stride_(x_stride), order_(order), made_(made) {}

    // Whole experts to threads, as many as go round: a thread then reads an expert front to back, and what it computes
    // stays with it. All threads share what is left.
    void compute(const int64_t* ids, const float* weights) {
        weights_ = weights;
        static thread_local Scratch memory;
        auto* shares = static_cast<Share*>(memory.take(sizeof(Share) * (m_.num_experts + pairs_ / MOST_ROWS + 1)));
        const int64_t count = divide(m_, pairs_, ids, order_, shares);
        placed_ = count > 0 ? shares[count - 1].end : 0;
        const int64_t threads = thread_pool->threads(), alone = count - count % threads;
        if (threads > 1) parallel_for(alone, pairs_ * m_.in_features * m_.inner_features, [&](int64_t i) { compute(shares[i]); }, 1);
        for (int64_t i = threads > 1 ? alone : 0; i < count; i++) compute(shares[i]);
    }

    // A token's experts are added up in the order of their numbers, whoever else is there.
    void add_up(int64_t rows, const T* residual, T* y) {
        int32_t* places = order_ + pairs_;
        std::fill_n(places, pairs_, -1);
        for (int64_t place = 0; place < placed_; place++) places[order_[place]] = static_cast<int32_t>(place);
        parallel_for(rows, pairs_ * m_.out_features, [&](int64_t row) {
            int32_t* mine = places + row * m_.top_k;
            std::sort(mine, mine + m_.top_k);
            for (int64_t begin = 0; begin < m_.out_features; begin += COLUMNS)
                add_columns(row, mine, begin, std::min(COLUMNS, m_.out_features - begin), residual, y);
        });
    }

private:
    static constexpr int64_t COLUMNS = 64;

    void compute(const Share& share) {
        static thread_local Scratch memory;
        const int64_t rows = share.end - share.begin, in = m_.gate_up.in_stride, inner = m_.down.in_stride;
        const int64_t both = m_.activation == NONE ? 0 : m_.gate_up.out_stride;
        T* gathered = static_cast<T*>(memory.take(sizeof(T) * rows * (in + inner + both)));
        T *gated = gathered + rows * in, *gates_and_ups = gated + rows * inner;
        for (int64_t i = 0; i < rows; i++)
            gather(order_[share.begin + i], gathered + i * in);
        m_.gate_up.make(share.expert, rows, gathered, both == 0 ? gated : gates_and_ups);
        for (int64_t i = 0; both != 0 && i < rows; i++) gate(m_, gates_and_ups + i * both, gated + i * inner);
        m_.down.make(share.expert, rows, gated, made_ + share.begin * m_.out_features);
    }

    void gather(int64_t pair, T* to) const {
        const T* from = x_ + pair / m_.top_k * x_stride_;
        if (!m_.weighs_inputs) {
            std::copy_n(from, m_.in_features, to);
            return;
        }
        const float weight = weights_[pair];
#pragma omp simd
        for (int64_t i = 0; i < m_.in_features; i++) to[i] = narrow<T>(widen(from[i]) * weight);
    }

    void add_columns(int64_t row, const int32_t* places, int64_t begin, int64_t count, const T* residual, T* y) const {
        float sums[COLUMNS] = {};
        for (int64_t k = 0; k < m_.top_k; k++) {
            if (places[k] < 0) continue;
            const float weight = m_.weighs_inputs ? 1.0f : weights_[order_[places[k]]];
            const T* made = made_ + places[k] * m_.out_features + begin;
#pragma omp simd
            for (int64_t i = 0; i < count; i++) sums[i] += widen(made[i]) * weight;
        }
        const int64_t at = row * m_.out_features + begin;
#pragma omp simd
        for (int64_t i = 0; i < count; i++)
            y[at + i] = narrow<T>(residual ? widen(residual[at + i]) + widen(narrow<T>(sums[i])) : sums[i]);
    }

    const Experts& m_;
    const int64_t pairs_;
    const T* x_;
    const int64_t x_stride_;
    int32_t* order_;
    T* made_;
    const float* weights_ = nullptr;
    int64_t placed_ = 0;  // pairs of experts that are here
};

}  // namespace

extern "C" void count_experts(int64_t pairs, const int64_t* ids, int64_t* counts) {
    for (int64_t i = 0; i < pairs; i++) counts[ids[i]]++;
}

#define EXPORT(T)                                                                                                      \
    extern "C" void choose_experts_##T(const Choice* choice, int64_t rows, const T* x, int64_t x_stride, int64_t* ids, \
                                       float* weights, float* room) {                                                  \
        choose_experts(*choice, rows, x, x_stride, ids, weights, room);                                                \
    }                                                                                                                  \
    extern "C" void mix_experts_##T(const Experts* experts, int64_t rows, const T* x, int64_t x_stride,                \
                                    const int64_t* ids, const float* weights, const T* residual, T* y, int32_t* order, \
                                    T* made) {                                                                         \
        Mixture<T> mixture(*experts, rows, x, x_stride, order, made);                                                  \
        mixture.compute(ids, weights);                                                                                 \
        mixture.add_up(rows, residual, y);                                                                             \
    }

EXPORT(float)
EXPORT(bfloat16)
