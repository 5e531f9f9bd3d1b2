// What lies between linear layers where no kernel has it with one of them: norms, rotations, cache writes, sums and
// gates, one pass over memory each. Elements T are float or bfloat16; all arithmetic is float32. Matrices are rows of
// contiguous elements; strides are in elements; results are contiguous.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "activations.h"
#include "element.h"
#include "thread_pool.h"

// Mirrored by a ctypes structure.
struct HeadNorms {
    const float *weight, *bias;  // [size], or [heads, size] by_head; bias may be null
    int64_t heads, size, by_head;
    int64_t centred;  // LayerNorm: the mean is taken away first
    float eps;
};

// Mirrored by a ctypes structure.
struct Rotation {
    int64_t heads, head_dim, half;
    int64_t start;        // of the rotated part
    int64_t interleaved;  // pairs are neighbours, not half the rotated part apart
};

// Mirrored by a ctypes structure.
struct PositionScale {
    int64_t size, length, offset;
    float beta;
};

enum Kind : int64_t { ADD = 0, GATE = 1, GATE_ALL = 2, GATED = 3, ACTIVATED = 4, SCALED = 5, CAPPED = 6, TIMES = 7 };
enum Plain : int64_t { GELU = 10, RELU = 11, RELU2 = 12 };  // activations without a vector form; below: Activation

// Mirrored by a ctypes structure.
struct Elementwise {
    int64_t kind, activation, size;
    float factor;
};

namespace {


template <typename T>
void norm_head(const HeadNorms& n, const T* x, const float* weight, const float* bias, T* y) {
    float mean = 0.0f, square = 0.0f;
    if (n.centred) {
#pragma omp simd reduction(+ : mean)
        for (int64_t i = 0; i < n.size; i++) mean += widen(x[i]);
        mean /= n.size;
    }
#pragma omp simd reduction(+ : square)
    for (int64_t i = 0; i < n.size; i++) square += (widen(x[i]) - mean) * (widen(x[i]) - mean);
    const float scale = 1.0f / std::sqrt(square / n.size + n.eps);
#pragma omp simd
    for (int64_t i = 0; i < n.size; i++)
        y[i] = narrow<T>((widen(x[i]) - mean) * scale * weight[i] + (bias ? bias[i] : 0.0f));
}

template <typename T>
void norm_heads(const HeadNorms& n, int64_t rows, const T* x, int64_t x_stride, T* y) {
    const int64_t width = n.heads * n.size;
    parallel_for(rows, rows * width, [&](int64_t row) {
        for (int64_t head = 0; head < n.heads; head++) {
            const int64_t at = n.by_head ? head * n.size : 0;
            norm_head(n, x + row * x_stride + head * n.size, n.weight + at, n.bias ? n.bias + at : nullptr,
                      y + row * width + head * n.size);
        }
    });
}

template <typename T>
void rotate_heads(const Rotation& r, int64_t rows, const T* x, int64_t x_stride, const float* cosines,
                  const float* sines, T* y) {
    const int64_t width = r.heads * r.head_dim;
    const int64_t step = r.interleaved ? 2 : 1, apart = r.interleaved ? 1 : r.half;
    parallel_for(rows, rows * width, [&](int64_t row) {
        const float *cosine = cosines + row * r.half, *sine = sines + row * r.half;
        for (int64_t head = 0; head < r.heads; head++) {
            const T* from = x + row * x_stride + head * r.head_dim;
            T* to = y + row * width + head * r.head_dim;
            std::copy_n(from, r.start, to);
            std::copy(from + r.start + 2 * r.half, from + r.head_dim, to + r.start + 2 * r.half);
            from += r.start, to += r.start;
            for (int64_t i = 0; i < r.half; i++) {
                const float first = widen(from[i * step]), second = widen(from[i * step + apart]);
                to[i * step] = narrow<T>(first * cosine[i] - second * sine[i]);
                to[i * step + apart] = narrow<T>(second * cosine[i] + first * sine[i]);
            }
        }
    });
}

float activated(int64_t activation, float x) {
    if (activation == GELU) return 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
    const float positive = x > 0.0f || x != x ? x : 0.0f;
    return activation == RELU ? positive : positive * positive;
}

part activated_part(int64_t activation, part x) {
    if (activation == SILU) return silu(x);
    if (activation == GELU_TANH) return gelu_tanh(x);
    for (int lane = 0; lane < PART_LANES; lane++) x[lane] = activated(activation, x[lane]);
    return x;
}

part combined(const Elementwise& e, part a, part b) {
    if (e.kind == ADD) return a + b;
    if (e.kind == GATE || e.kind == GATE_ALL) return a * over_one_plus_exp2(broadcast_part(1.0f), b * -LOG2_E);
    if (e.kind == GATED) return activated_part(e.activation, a) * b;
    if (e.kind == ACTIVATED) return activated_part(e.activation, a);
    if (e.kind == SCALED) return a * e.factor;
    if (e.kind == TIMES) return a * b;
    // tanh(u) = 1 - 2 / (1 + exp(2 u))
    const part u = a * (1.0f / e.factor);
    return e.factor * (1.0f - over_one_plus_exp2(broadcast_part(2.0f), u * (2.0f * LOG2_E)));
}

// b: rows of as many elements, of one (GATE_ALL), or null.
template <typename T>
void combine(const Elementwise& e, int64_t rows, const T* a, int64_t a_stride, const T* b, int64_t b_stride, T* y) {
    const int64_t left = e.size % PART_LANES, whole = e.size - left;
    parallel_for(rows, rows * e.size, [&](int64_t row) {
        const T *first = a + row * a_stride, *second = b + row * b_stride;
        T* out = y + row * e.size;
        const part one = e.kind == GATE_ALL ? broadcast_part(widen(*second)) : broadcast_part(0.0f);
        const bool reads = b != nullptr && e.kind != GATE_ALL;
        for (int64_t i = 0; i < whole; i += PART_LANES)
            narrow_part(out + i, combined(e, widen_part(first + i), reads ? widen_part(second + i) : one));
        T last[3][PART_LANES] = {};
        std::copy_n(first + whole, left, last[0]);
        if (reads) std::copy_n(second + whole, left, last[1]);
        narrow_part(last[2], combined(e, widen_part(last[0]), reads ? widen_part(last[1]) : one));
        std::copy_n(last[2], left, out + whole);
    });
}

template <typename T>
void scale_by_position(const PositionScale& p, int64_t rows, const T* x, int64_t x_stride, const int64_t* positions,
                       T* y) {
    parallel_for(rows, rows * p.size, [&](int64_t row) {
        const float factor = 1.0f + p.beta * std::log1p(static_cast<float>((positions[row] + p.offset) / p.length));
#pragma omp simd
        for (int64_t i = 0; i < p.size; i++) y[row * p.size + i] = narrow<T>(widen(x[row * x_stride + i]) * factor);
    });
}

// v: null where values are a part of keys.
template <typename T>
void write_kv(int64_t tokens, int64_t size, const T* k, int64_t k_stride, const T* v, int64_t v_stride,
              const int64_t* slots, T* keys, T* values) {
    for (int64_t token = 0; token < tokens; token++) {
        std::copy_n(k + token * k_stride, size, keys + slots[token] * size);
        if (v != nullptr) std::copy_n(v + token * v_stride, size, values + slots[token] * size);
    }
}

}  // namespace

#define EXPORT(T)                                                                                                    \
    extern "C" void norm_heads_##T(const HeadNorms* norms, int64_t rows, const T* x, int64_t x_stride, T* y) {       \
        norm_heads(*norms, rows, x, x_stride, y);                                                                    \
    }                                                                                                                \
    extern "C" void rotate_heads_##T(const Rotation* rotation, int64_t rows, const T* x, int64_t x_stride,           \
                                     const float* cosines, const float* sines, T* y) {                               \
        rotate_heads(*rotation, rows, x, x_stride, cosines, sines, y);                                               \
    }                                                                                                                \
    extern "C" void combine_##T(const Elementwise* what, int64_t rows, const T* a, int64_t a_stride, const T* b,     \
                                int64_t b_stride, T* y) {                                                            \
        combine(*what, rows, a, a_stride, b, b_stride, y);                                                           \
    }                                                                                                                \
    extern "C" void scale_by_position_##T(const PositionScale* scale, int64_t rows, const T* x, int64_t x_stride,    \
                                          const int64_t* positions, T* y) {                                          \
        scale_by_position(*scale, rows, x, x_stride, positions, y);                                                  \
    }                                                                                                                \
    extern "C" void write_kv_##T(int64_t tokens, int64_t size, const T* k, int64_t k_stride, const T* v,             \
                                 int64_t v_stride, const int64_t* slots, T* keys, T* values) {                       \
        write_kv(tokens, size, k, k_stride, v, v_stride, slots, keys, values);                                       \
    }

EXPORT(float)
EXPORT(bfloat16)
