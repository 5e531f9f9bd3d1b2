// What computes each head by itself: parts of heads are copied, and heads are multiplied by matrices of their own.
// Elements T are float or bfloat16; all arithmetic is float32. Strides are in elements.

#include <algorithm>
#include <cstdint>

#include "element.h"
#include "thread_pool.h"
#include "thread_scratch.h"
#include "vectors.h"

// Mirrored by a ctypes structure.
struct HeadCopy {
    int64_t heads, size;         // elements to copy of each
    int64_t from_dim, from_at;   // of a head that is read, and where in it to begin
    int64_t to_dim, to_at;       // of one that is written
};

// Mirrored by a ctypes structure. Of each head `chosen` rows of `features` weights, those of the next head `next`
// elements after.
struct HeadProduct {
    int64_t heads, chosen, features, next;
    int64_t transposed;  // x [chosen] -> [features], else x [features] -> [chosen]
    const void* weights;
};

namespace {

constexpr int64_t PREFETCH = 2048;  // bytes; the hardware prefetcher stops at every page

template <typename T>
void copy_heads(const HeadCopy& c, int64_t rows, const T* x, int64_t x_stride, T* y, int64_t y_stride) {
    parallel_for(rows, rows * c.heads * c.size, [&](int64_t row) {
        for (int64_t head = 0; head < c.heads; head++)
            std::copy_n(x + row * x_stride + head * c.from_dim + c.from_at, c.size,
                        y + row * y_stride + head * c.to_dim + c.to_at);
    });
}

template <typename T>
void prefetch_weights(const T* from) {
    __builtin_prefetch(reinterpret_cast<const char*>(from) + PREFETCH);
}

// y[j] = W[j] . x
template <typename T>
void multiply_rows(const HeadProduct& p, const T* weights, const float* x, T* y) {
    const int64_t whole = p.features / PART_LANES * PART_LANES;
    for (int64_t row = 0; row < p.chosen; row++, weights += p.features) {
        part sums[2] = {};
        for (int64_t i = 0; i < whole; i += PART_LANES) {
            prefetch_weights(weights + i);
            sums[i / PART_LANES % 2] += widen_part(weights + i) * load_part(x + i);
        }
        float sum = 0.0f;
        for (int lane = 0; lane < PART_LANES; lane++) sum += sums[0][lane] + sums[1][lane];
        for (int64_t i = whole; i < p.features; i++) sum += widen(weights[i]) * x[i];
        y[row] = narrow<T>(sum);
    }
}

// y = sum of x[j] * W[j]; sums: [features]
template <typename T>
void multiply_columns(const HeadProduct& p, const T* weights, const float* x, float* sums, T* y) {
    std::fill_n(sums, p.features, 0.0f);
    const int64_t whole = p.features / PART_LANES * PART_LANES;
    for (int64_t row = 0; row < p.chosen; row++, weights += p.features) {
        for (int64_t i = 0; i < whole; i += PART_LANES) {
            prefetch_weights(weights + i);
            store_part(sums + i, load_part(sums + i) + widen_part(weights + i) * x[row]);
        }
        for (int64_t i = whole; i < p.features; i++) sums[i] += widen(weights[i]) * x[row];
    }
    for (int64_t i = 0; i < p.features; i++) y[i] = narrow<T>(sums[i]);
}

// A head at a time with all rows: its weights are read from memory once.
template <typename T>
void multiply_heads(const HeadProduct& p, int64_t rows, const T* x, int64_t x_stride, T* y) {
    const int64_t in = p.transposed ? p.chosen : p.features, out = p.transposed ? p.features : p.chosen;
    parallel_for(p.heads, p.heads * p.chosen * p.features, [&](int64_t head) {
        static thread_local Scratch memory;
        float* wide = static_cast<float*>(memory.take(sizeof(float) * (p.chosen + 2 * p.features)));
        const T* weights = static_cast<const T*>(p.weights) + head * p.next;
        for (int64_t row = 0; row < rows; row++) {
            const T* from = x + row * x_stride + head * in;
            T* to = y + (row * p.heads + head) * out;
            for (int64_t i = 0; i < in; i++) wide[i] = widen(from[i]);
            if (p.transposed)
                multiply_columns(p, weights, wide, wide + in, to);
            else
                multiply_rows(p, weights, wide, to);
        }
    });
}

}  // namespace

#define EXPORT(T)                                                                                                  \
    extern "C" void copy_heads_##T(const HeadCopy* copy, int64_t rows, const T* x, int64_t x_stride, T* y,         \
                                   int64_t y_stride) {                                                             \
        copy_heads(*copy, rows, x, x_stride, y, y_stride);                                                         \
    }                                                                                                              \
    extern "C" void multiply_heads_##T(const HeadProduct* product, int64_t rows, const T* x, int64_t x_stride,     \
                                       T* y) {                                                                     \
        multiply_heads(*product, rows, x, x_stride, y);                                                            \
    }

EXPORT(float)
EXPORT(bfloat16)
