// What lies between the linear layers, each op one pass over memory: RMSNorm; q and k norm, rotation and KV write;
// the gated activation. Elements T are float or bfloat16; all arithmetic is float32. Matrices are rows of contiguous
// elements; strides are in elements.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "activations.h"
#include "element.h"
#include "thread_pool.h"

// RMSNorm over rows; mirrored by a ctypes structure.
struct RowNorm {
    const float* weight;  // [size]
    int64_t size;
    float eps;
};

namespace {


template <typename T>
float inverse_rms(const T* x, int64_t size, float eps) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) {
        const float value = widen(x[i]);
        sum += value * value;
    }
    return 1.0f / std::sqrt(sum / size + eps);
}

template <typename T>
void normalise(const T* x, const float* weight, float eps, int64_t size, T* y) {
    const float scale = inverse_rms(x, size, eps);
#pragma omp simd
    for (int64_t i = 0; i < size; i++) y[i] = narrow<T>(widen(x[i]) * scale * weight[i]);
}

template <typename T>
void rms_norm(const RowNorm& norm, int64_t rows, const T* x, int64_t x_stride, T* y) {
    parallel_for(rows, rows * norm.size, [&](int64_t row) {
        normalise(x + row * x_stride, norm.weight, norm.eps, norm.size, y + row * norm.size);
    });
}

// Pairs (x[i], x[i + half]) turn by the angle whose cosine and sine are given.
template <typename T>
void rotate(T* x, const float* cosines, const float* sines, int64_t half) {
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        const float first = widen(x[i]), second = widen(x[i + half]);
        x[i] = narrow<T>(first * cosines[i] - second * sines[i]);
        x[i + half] = narrow<T>(second * cosines[i] + first * sines[i]);
    }
}

}  // namespace

// What stays the same from call to call; mirrored by a ctypes structure.
struct Heads {
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t rotary_half;          // 0: no rotation
    const float *q_norm, *k_norm;  // [head_dim]; null: no norm
    float q_eps, k_eps;
};

namespace {

template <typename T>
struct Token {
    T* heads;  // q heads, then k heads, then v heads
    const float *cosines, *sines;
};

template <typename T>
void norm_and_rotate(const Heads& shape, const Token<T>& token) {
    const int64_t dim = shape.head_dim;
    for (int64_t head = 0; head < shape.num_heads + shape.num_kv_heads; head++) {
        const bool query = head < shape.num_heads;
        const float* weight = query ? shape.q_norm : shape.k_norm;
        T* x = token.heads + head * dim;
        if (weight != nullptr) normalise(x, weight, query ? shape.q_eps : shape.k_eps, dim, x);
        if (shape.rotary_half > 0) rotate(x, token.cosines, token.sines, shape.rotary_half);
    }
}

// qkv: [tokens, (num_heads + 2 num_kv_heads) * head_dim], q and k changed in place. keys, values: [slots,
// num_kv_heads, head_dim]; null: the caller writes them.
template <typename T>
void rotate_and_write(const Heads& shape, int64_t tokens, T* qkv, const float* cosines, const float* sines,
                      const int64_t* slots, T* keys, T* values) {
    const int64_t kv_size = shape.num_kv_heads * shape.head_dim, q_size = shape.num_heads * shape.head_dim;
    const int64_t row_size = q_size + 2 * kv_size;
    parallel_for(tokens, tokens * row_size, [&](int64_t token) {
        T* row = qkv + token * row_size;
        const int64_t angle = token * shape.rotary_half;
        norm_and_rotate<T>(shape, {row, cosines + angle, sines + angle});
        if (keys == nullptr) return;
        std::copy_n(row + q_size, kv_size, keys + slots[token] * kv_size);
        std::copy_n(row + q_size + kv_size, kv_size, values + slots[token] * kv_size);
    });
}

template <typename T>
void gate_part(Activation activation, const T* gate, const T* up, T* y) {
    narrow_part(y, gated(activation, widen_part(gate), widen_part(up)));
}

// gate_up: [rows, 2 * size], gates first -> y: [rows, size]
template <typename T>
void gated_activation(int64_t rows, int64_t size, const T* gate_up, Activation activation, T* y) {
    const int64_t left = size % PART_LANES, whole = size - left;
    parallel_for(rows, rows * size, [&](int64_t row) {
        const T *gate = gate_up + row * 2 * size, *up = gate + size;
        T* out = y + row * size;
        for (int64_t i = 0; i < whole; i += PART_LANES) gate_part(activation, gate + i, up + i, out + i);
        T last[3][PART_LANES] = {};
        std::copy_n(gate + whole, left, last[0]);
        std::copy_n(up + whole, left, last[1]);
        gate_part(activation, last[0], last[1], last[2]);
        std::copy_n(last[2], left, out + whole);
    });
}

}  // namespace

#define EXPORT(T)                                                                                                     \
    extern "C" void rms_norm_##T(const RowNorm* norm, int64_t rows, const T* x, int64_t x_stride, T* y) {             \
        rms_norm(*norm, rows, x, x_stride, y);                                                                        \
    }                                                                                                                 \
    extern "C" void rotate_and_write_##T(const Heads* shape, int64_t tokens, T* qkv, const float* cosines,            \
                                         const float* sines, const int64_t* slots, T* keys, T* values) {              \
        rotate_and_write(*shape, tokens, qkv, cosines, sines, slots, keys, values);                                   \
    }                                                                                                                 \
    extern "C" void gated_activation_##T(int64_t rows, int64_t size, const T* gate_up, Activation activation, T* y) { \
        gated_activation(rows, size, gate_up, activation, y);                                                         \
    }

EXPORT(float)
EXPORT(bfloat16)
