// Recurrent ops on a paged cache: a short convolution, and the gated delta rule (arXiv 2412.06464), token by token.
//
// What earlier tokens left lies in the cache by position, in float32: of each token the inputs of the convolution; its
// key, what it wrote and its decay; and behind each full block the state. Elements T of activations are float or
// bfloat16; all arithmetic is float32. Strides are in elements.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "activations.h"
#include "element.h"

// Features of one input of a convolution; mirrored by a ctypes structure.
struct Convolution {
    const float* taps;  // [kernel][tap_stride], the oldest first
    float* kept;        // of slot 0; slots are kept_stride apart
    int64_t tap_stride, kept_stride, out_stride, features, kernel, block_size;
};

// Mirrored by a ctypes structure.
struct Gates {
    const float* rate;  // [heads], below 0
    const float* bias;  // [heads]
    int64_t heads;
};

// Mirrored by a ctypes structure.
struct DeltaRule {
    float* kept;    // [slots][keys of all key heads, what was written by all heads, decay of all heads]
    float* states;  // [blocks][heads][key_dim][value_dim]
    int64_t key_heads, key_dim, heads, value_dim, block_size;

    int64_t keys() const { return key_heads * key_dim; }
    int64_t values() const { return heads * value_dim; }
    int64_t kept_stride() const { return keys() + values() + heads; }
};

namespace {

constexpr int64_t PARALLEL_ELEMENTS = 1 << 15;
constexpr float LENGTH_EPS = 1e-6f;

// The rows of a step and their blocks.
struct Rows {
    int64_t count;
    const int32_t* q_starts;
    const int32_t* kv_lens;
    const int32_t* tables;
    int64_t table_stride, block_size;

    int64_t tokens() const { return q_starts[count]; }
    int64_t q_len(int64_t row) const { return q_starts[row + 1] - q_starts[row]; }
    int64_t first(int64_t row) const { return kv_lens[row] - q_len(row); }
    int64_t block(int64_t row, int64_t index) const { return tables[row * table_stride + index]; }
    int64_t slot(int64_t row, int64_t position) const {
        return block(row, position / block_size) * block_size + position % block_size;
    }
};

template <typename T>
void convolve(const Convolution& c, const Rows& rows, int64_t row, int64_t begin, int64_t end, const T* x,
              int64_t x_stride, float* y) {
    const int64_t size = end - begin, first = rows.first(row);
    for (int64_t i = 0; i < rows.q_len(row); i++) {
        const T* in = x + i * x_stride + begin;
        float* out = y + i * c.out_stride + begin;
        const float* newest = c.taps + (c.kernel - 1) * c.tap_stride + begin;
#pragma omp simd
        for (int64_t f = 0; f < size; f++) out[f] = widen(in[f]) * newest[f];
        for (int64_t back = 1; back < c.kernel && back <= first + i; back++) {
            const float* tap = newest - back * c.tap_stride;
            if (back <= i) {
                const T* before = in - back * x_stride;
#pragma omp simd
                for (int64_t f = 0; f < size; f++) out[f] += widen(before[f]) * tap[f];
            } else {
                const float* before = c.kept + rows.slot(row, first + i - back) * c.kept_stride + begin;
#pragma omp simd
                for (int64_t f = 0; f < size; f++) out[f] += before[f] * tap[f];
            }
        }
        const int64_t whole = size - size % PART_LANES;
        for (int64_t f = 0; f < whole; f += PART_LANES) store_part(out + f, silu(load_part(out + f)));
        for (int64_t f = whole; f < size; f++) out[f] = out[f] / (1.0f + std::exp(-out[f]));
    }
    for (int64_t i = 0; i < rows.q_len(row); i++) {
        float* to = c.kept + rows.slot(row, first + i) * c.kept_stride + begin;
#pragma omp simd
        for (int64_t f = 0; f < size; f++) to[f] = widen(x[i * x_stride + begin + f]);
    }
}

template <typename T>
void short_conv(const Convolution& c, const Rows& rows, const T* x, int64_t x_stride, float* y) {
    constexpr int64_t STRIPE = 256;
    const int64_t stripes = (c.features + STRIPE - 1) / STRIPE;
#pragma omp parallel for schedule(static) if (rows.tokens() * c.features >= PARALLEL_ELEMENTS)
    for (int64_t stripe = 0; stripe < stripes; stripe++)
        for (int64_t row = 0; row < rows.count; row++)
            convolve(c, rows, row, stripe * STRIPE, std::min((stripe + 1) * STRIPE, c.features),
                     x + rows.q_starts[row] * x_stride, x_stride, y + rows.q_starts[row] * c.out_stride);
}

// -> y [rows][strengths of all heads, logarithms of decays of all heads]
template <typename T>
void gates(const Gates& g, int64_t rows, const T* write, int64_t write_stride, const T* decay, int64_t decay_stride,
           float* y) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < g.heads; head++) {
            const float x = widen(decay[row * decay_stride + head]) + g.bias[head];
            float* to = y + row * 2 * g.heads + head;
            to[0] = 1.0f / (1.0f + std::exp(-widen(write[row * write_stride + head])));
            to[g.heads] = g.rate[head] * (std::max(x, 0.0f) + std::log1p(std::exp(-std::abs(x))));
        }
}

float dot(const float* a, const float* b, int64_t size) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += a[i] * b[i];
    return sum;
}

void unit(const float* x, int64_t size, float factor, float* y) {
    const float scale = factor / std::sqrt(dot(x, x, size) + LENGTH_EPS);
#pragma omp simd
    for (int64_t i = 0; i < size; i++) y[i] = x[i] * scale;
}

void add_scaled(float* to, float factor, const float* x, int64_t size) {
#pragma omp simd
    for (int64_t i = 0; i < size; i++) to[i] += factor * x[i];
}

// A key head of a row, with the heads that share it.
struct Memory {
    std::vector<float> q, k, of_key, of_query, fade, seen, made;

    Memory(const DeltaRule& r)
        : q(r.key_dim), k(r.key_dim), of_key(r.block_size), of_query(r.block_size), fade(r.block_size),
          seen(r.value_dim), made(r.value_dim) {}
};

// state -> the one behind a full block: what it faded to, and what the block's tokens wrote.
void next_state(const DeltaRule& r, const float* kept, int64_t key_head, int64_t head, const float* state,
                float faded, const float* fade, float* to) {
    for (int64_t d = 0; d < r.key_dim; d++) {
        float* row = to + d * r.value_dim;
#pragma omp simd
        for (int64_t v = 0; v < r.value_dim; v++) row[v] = state ? faded * state[d * r.value_dim + v] : 0.0f;
        for (int64_t s = 0; s < r.block_size; s++) {
            const float* token = kept + s * r.kept_stride();
            const float* written = token + r.keys() + head * r.value_dim;
            add_scaled(row, fade[s] * token[key_head * r.key_dim + d], written, r.value_dim);
        }
    }
}

template <typename T>
void one_head(const DeltaRule& r, float* kept, int64_t at, int64_t key_head, int64_t head, const float* state,
              float* behind, const float* v, float strength, float decay, Memory& m, T* y) {
    float* token = kept + at * r.kept_stride();
    const int64_t dim = r.value_dim, decays = r.keys() + r.values() + head;
    token[decays] = decay;
    float total = 0.0f;  // from behind each token to here
    for (int64_t s = at; s >= 0; s--) {
        m.fade[s] = std::exp(total);
        total += kept[s * r.kept_stride() + decays];
    }
    const float faded = std::exp(total);
    std::fill(m.seen.begin(), m.seen.end(), 0.0f);
    std::fill(m.made.begin(), m.made.end(), 0.0f);
    if (state)
        for (int64_t d = 0; d < r.key_dim; d++) {
            const float of_key = faded * m.k[d], of_query = faded * m.q[d];
            const float* row = state + d * dim;
#pragma omp simd
            for (int64_t i = 0; i < dim; i++) {
                m.seen[i] += of_key * row[i];
                m.made[i] += of_query * row[i];
            }
        }
    for (int64_t s = 0; s < at; s++) {
        const float* written = kept + s * r.kept_stride() + r.keys() + head * dim;
        const float of_key = m.fade[s] * m.of_key[s], of_query = m.fade[s] * m.of_query[s];
#pragma omp simd
        for (int64_t i = 0; i < dim; i++) {
            m.seen[i] += of_key * written[i];
            m.made[i] += of_query * written[i];
        }
    }
    float* written = token + r.keys() + head * dim;
#pragma omp simd
    for (int64_t i = 0; i < dim; i++) {
        written[i] = strength * (v[i] - m.seen[i]);
        y[i] = narrow<T>(m.made[i] + m.of_query[at] * written[i]);
    }
    if (at == r.block_size - 1) next_state(r, kept, key_head, head, state, faded, m.fade.data(), behind);
}

template <typename T>
void one_row(const DeltaRule& r, const Rows& rows, int64_t row, int64_t key_head, const float* qkv,
             const float* gates, T* y) {
    const int64_t group = r.heads / r.key_heads, key = key_head * r.key_dim, width = 2 * r.keys() + r.values();
    const int64_t state_size = r.key_dim * r.value_dim;
    Memory m(r);
    for (int64_t i = rows.q_starts[row]; i < rows.q_starts[row + 1]; i++) {
        const int64_t position = rows.first(row) + i - rows.q_starts[row];
        const int64_t index = position / r.block_size, at = position % r.block_size;
        const int64_t block = rows.block(row, index);
        float* kept = r.kept + block * r.block_size * r.kept_stride();
        unit(qkv + i * width + key, r.key_dim, 1.0f / std::sqrt(static_cast<float>(r.key_dim)), m.q.data());
        unit(qkv + i * width + r.keys() + key, r.key_dim, 1.0f, m.k.data());
        std::copy(m.k.begin(), m.k.end(), kept + at * r.kept_stride() + key);
        for (int64_t s = 0; s <= at; s++) {
            const float* earlier = kept + s * r.kept_stride() + key;
            m.of_key[s] = dot(m.k.data(), earlier, r.key_dim);
            m.of_query[s] = dot(m.q.data(), earlier, r.key_dim);
        }
        for (int64_t head = key_head * group; head < (key_head + 1) * group; head++) {
            const float* state = index == 0 ? nullptr
                                            : r.states + (rows.block(row, index - 1) * r.heads + head) * state_size;
            one_head(r, kept, at, key_head, head, state, r.states + (block * r.heads + head) * state_size,
                     qkv + i * width + 2 * r.keys() + head * r.value_dim, gates[i * 2 * r.heads + head],
                     gates[(i * 2 + 1) * r.heads + head], m, y + i * r.values() + head * r.value_dim);
        }
    }
}

template <typename T>
void delta_rule(const DeltaRule& r, const Rows& rows, const float* qkv, const float* gates, T* y) {
    const bool large = rows.tokens() * r.values() * r.key_dim >= PARALLEL_ELEMENTS;
#pragma omp parallel for collapse(2) schedule(dynamic) if (large)
    for (int64_t row = 0; row < rows.count; row++)
        for (int64_t key_head = 0; key_head < r.key_heads; key_head++)
            one_row(r, rows, row, key_head, qkv, gates, y);
}

}  // namespace

#define EXPORT(T)                                                                                                    \
    extern "C" void short_conv_##T(const Convolution* c, int64_t rows, const int32_t* q_starts,                      \
                                   const int32_t* kv_lens, const int32_t* tables, int64_t table_stride, const T* x,  \
                                   int64_t x_stride, float* y) {                                                     \
        short_conv(*c, Rows{rows, q_starts, kv_lens, tables, table_stride, c->block_size}, x, x_stride, y);          \
    }                                                                                                                \
    extern "C" void gates_##T(const Gates* g, int64_t rows, const T* write, int64_t write_stride, const T* decay,    \
                              int64_t decay_stride, float* y) {                                                      \
        gates(*g, rows, write, write_stride, decay, decay_stride, y);                                                \
    }                                                                                                                \
    extern "C" void delta_rule_##T(const DeltaRule* r, int64_t rows, const int32_t* q_starts,                        \
                                   const int32_t* kv_lens, const int32_t* tables, int64_t table_stride,              \
                                   const float* qkv, const float* gates, T* y) {                                     \
        delta_rule(*r, Rows{rows, q_starts, kv_lens, tables, table_stride, r->block_size}, qkv, gates, y);           \
    }

EXPORT(float)
EXPORT(bfloat16)
