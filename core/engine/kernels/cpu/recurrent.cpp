// Recurrent ops on a paged cache: a short convolution, and the gated delta rule (arXiv 2412.06464), block by block.
//
// What earlier tokens left lies in the cache by position, in float32: of each token the inputs of the convolution; its
// key, what it wrote and its decay; and after each full block the state. Elements T of activations are float or
// bfloat16; all arithmetic is float32. Strides are in elements.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "activations.h"
#include "element.h"
#include "thread_pool.h"

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
    parallel_for(stripes, rows.tokens() * c.features, [&](int64_t stripe) {
        for (int64_t row = 0; row < rows.count; row++)
            convolve(c, rows, row, stripe * STRIPE, std::min((stripe + 1) * STRIPE, c.features),
                     x + rows.q_starts[row] * x_stride, x_stride, y + rows.q_starts[row] * c.out_stride);
    });
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

// N rows and STRIPS registers of a product, see below.
template <int N, int STRIPS>
void add_tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t count, float* out,
              int64_t out_stride) {
    part sums[N][STRIPS];
    for (int n = 0; n < N; n++)
        for (int s = 0; s < STRIPS; s++) sums[n][s] = load_part(out + n * out_stride + s * PART_LANES);
    for (int64_t i = 0; i < count; i++)
        for (int s = 0; s < STRIPS; s++) {
            const part row = load_part(b + i * b_stride + s * PART_LANES);
            for (int n = 0; n < N; n++) sums[n][s] += a[n * a_stride + i] * row;
        }
    for (int n = 0; n < N; n++)
        for (int s = 0; s < STRIPS; s++) store_part(out + n * out_stride + s * PART_LANES, sums[n][s]);
}

// out [rows][width] += a [rows][count] b [count][width]
void add_product(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t rows, int64_t count,
                 int64_t width, float* out, int64_t out_stride) {
    constexpr int64_t STEP = 2 * PART_LANES;
    const int64_t whole = width - width % STEP;
    for (int64_t v = 0; v < whole; v += STEP) {
        int64_t n = 0;
        for (; n + 4 <= rows; n += 4)
            add_tile<4, 2>(a + n * a_stride, a_stride, b + v, b_stride, count, out + n * out_stride + v, out_stride);
        for (; n < rows; n++)
            add_tile<1, 2>(a + n * a_stride, a_stride, b + v, b_stride, count, out + n * out_stride + v, out_stride);
    }
    for (int64_t n = 0; n < rows && whole < width; n++)
        for (int64_t i = 0; i < count; i++)
            for (int64_t v = whole; v < width; v++) out[n * out_stride + v] += a[n * a_stride + i] * b[i * b_stride + v];
}

// Consecutive tokens of one block of a row.
struct Segment {
    const DeltaRule& rule;
    int64_t begin, count;  // in the block
    float* kept;           // of the block's first token
    const float* before;   // states of all heads after the block before; null: there is none
    float* after;          // and after this block

    int64_t end() const { return begin + count; }
    float* token(int64_t at) const { return kept + at * rule.kept_stride(); }
    float* written(int64_t at, int64_t head) const { return token(at) + rule.keys() + head * rule.value_dim; }
    float& decay(int64_t at, int64_t head) const { return token(at)[rule.keys() + rule.values() + head]; }
};

// What one thread needs for a key head, with the heads that share it. Rows are those of a segment's tokens.
struct Room {
    std::vector<float> q, k;              // [most][key_dim]
    std::vector<float> in_key, in_query;  // [most][block_size]: with the key of each token of the block
    std::vector<float> seen, made;        // [most][value_dim]
    std::vector<float> share;             // [most][block_size]; at a block's end [key_dim][block_size]
    std::vector<float> fade;              // [block_size]: from after each token of the block to where we are

    // most: tokens of a segment
    Room(const DeltaRule& r, int64_t most)
        : q(most * r.key_dim), k(q.size()), in_key(most * r.block_size), in_query(in_key.size()),
          seen(most * r.value_dim), made(seen.size()), share(most * r.block_size), fade(r.block_size) {}
};

// Queries and keys of length 1, and their products with all keys of the block so far.
void begin_segment(const Segment& s, int64_t key_head, const float* qkv, Room& room) {
    const DeltaRule& r = s.rule;
    const int64_t width = 2 * r.keys() + r.values(), key = key_head * r.key_dim;
    for (int64_t i = 0; i < s.count; i++) {
        float *q = room.q.data() + i * r.key_dim, *k = room.k.data() + i * r.key_dim;
        unit(qkv + i * width + key, r.key_dim, 1.0f / std::sqrt(static_cast<float>(r.key_dim)), q);
        unit(qkv + i * width + r.keys() + key, r.key_dim, 1.0f, k);
        std::copy_n(k, r.key_dim, s.token(s.begin + i) + key);
        for (int64_t at = 0; at <= s.begin + i; at++) {
            room.in_key[i * r.block_size + at] = dot(k, s.token(at) + key, r.key_dim);
            room.in_query[i * r.block_size + at] = dot(q, s.token(at) + key, r.key_dim);
        }
    }
}

// The state after the block: what the one before it faded to, and what the block's tokens wrote.
void end_block(const Segment& s, int64_t key_head, int64_t head, const float* state, float faded, Room& room) {
    const DeltaRule& r = s.rule;
    float* to = s.after + head * r.key_dim * r.value_dim;
    for (int64_t i = 0; i < r.key_dim * r.value_dim; i++) to[i] = state ? faded * state[i] : 0.0f;
    room.share.resize(std::max(static_cast<int64_t>(room.share.size()), r.key_dim * r.block_size));
    for (int64_t at = 0; at < r.block_size; at++) {
        const float* key = s.token(at) + key_head * r.key_dim;
        for (int64_t d = 0; d < r.key_dim; d++) room.share[d * r.block_size + at] = room.fade[at] * key[d];
    }
    add_product(room.share.data(), r.block_size, s.written(0, head), r.kept_stride(), r.key_dim, r.block_size,
                r.value_dim, to, r.value_dim);
}

// How decays until the segment begins add up; returns how far the state before the block has faded.
float begin_fade(const Segment& s, int64_t head, float* fade) {
    float total = 0.0f;
    for (int64_t at = s.begin - 1; at >= 0; at--) {
        fade[at] = std::exp(total);
        total += s.decay(at, head);
    }
    return std::exp(total);
}

// qkv, gates, y: of the segment's first token.
template <typename T>
void one_head(const Segment& s, int64_t key_head, int64_t head, const float* qkv, const float* gates, T* y,
              Room& room) {
    const DeltaRule& r = s.rule;
    const int64_t dim = r.value_dim, size = r.block_size, width = 2 * r.keys() + r.values();
    const float* state = s.before ? s.before + head * r.key_dim * dim : nullptr;
    std::fill_n(room.seen.begin(), s.count * dim, 0.0f);
    std::fill_n(room.made.begin(), s.count * dim, 0.0f);
    if (state) {
        add_product(room.k.data(), r.key_dim, state, dim, s.count, r.key_dim, dim, room.seen.data(), dim);
        add_product(room.q.data(), r.key_dim, state, dim, s.count, r.key_dim, dim, room.made.data(), dim);
    }
    float faded = begin_fade(s, head, room.fade.data());
    for (int64_t i = 0; i < s.count; i++) {
        const int64_t here = s.begin + i;
        const float decay = gates[i * 2 * r.heads + r.heads + head], kept = std::exp(decay);
        const float *in_key = room.in_key.data() + i * size, *in_query = room.in_query.data() + i * size;
        float *seen = room.seen.data() + i * dim, *made = room.made.data() + i * dim;
        float *shares = room.share.data() + i * size, *written = s.written(here, head);
        s.decay(here, head) = decay;
        faded *= kept;
        for (int64_t at = 0; at < here; at++) {
            room.fade[at] *= kept;
            shares[at] = room.fade[at] * in_key[at];
        }
        room.fade[here] = 1.0f;
        for (int64_t v = 0; v < dim; v++) seen[v] *= faded;
        add_product(shares, size, s.written(0, head), r.kept_stride(), 1, here, dim, seen, dim);
        const float* value = qkv + i * width + 2 * r.keys() + head * dim;
        const float strength = gates[i * 2 * r.heads + head];
        for (int64_t v = 0; v < dim; v++) {
            written[v] = strength * (value[v] - seen[v]);
            made[v] *= faded;
        }
        for (int64_t at = 0; at < s.end(); at++) shares[at] = at <= here ? room.fade[at] * in_query[at] : 0.0f;
    }
    add_product(room.share.data(), size, s.written(0, head), r.kept_stride(), s.count, s.end(), dim, room.made.data(),
                dim);
    for (int64_t i = 0; i < s.count; i++)
        for (int64_t v = 0; v < dim; v++) y[i * r.values() + head * dim + v] = narrow<T>(room.made[i * dim + v]);
    if (s.end() == size) end_block(s, key_head, head, state, faded, room);
}

template <typename T>
void one_row(const DeltaRule& r, const Rows& rows, int64_t row, int64_t key_head, const float* qkv,
             const float* gates, T* y) {
    const int64_t group = r.heads / r.key_heads, states = r.heads * r.key_dim * r.value_dim;
    Room room(r, std::min(r.block_size, rows.q_len(row)));
    int64_t token = rows.q_starts[row], position = rows.first(row);
    while (token < rows.q_starts[row + 1]) {
        const int64_t begin = position % r.block_size, index = position / r.block_size;
        const int64_t count = std::min(r.block_size - begin, rows.q_starts[row + 1] - token);
        const int64_t block = rows.block(row, index);
        const Segment segment{r, begin, count, r.kept + block * r.block_size * r.kept_stride(),
                              index ? r.states + rows.block(row, index - 1) * states : nullptr,
                              r.states + block * states};
        const float* inputs = qkv + token * (2 * r.keys() + r.values());
        begin_segment(segment, key_head, inputs, room);
        for (int64_t head = key_head * group; head < (key_head + 1) * group; head++)
            one_head(segment, key_head, head, inputs, gates + token * 2 * r.heads, y + token * r.values(), room);
        token += count;
        position += count;
    }
}

template <typename T>
void delta_rule(const DeltaRule& r, const Rows& rows, const float* qkv, const float* gates, T* y) {
    const int64_t work = rows.tokens() * r.values() * r.key_dim;
    const auto one = [&](int64_t i) { one_row(r, rows, i / r.key_heads, i % r.key_heads, qkv, gates, y); };
    parallel_for(rows.count * r.key_heads, work, one, 1);
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
