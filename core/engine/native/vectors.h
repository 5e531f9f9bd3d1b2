// Sixteen floats at a time, in whatever registers the processor has.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>

#include "element.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAS_AVX512 1
#include <immintrin.h>
#else
#define HAS_AVX512 0
#endif

constexpr int LANES = 16;
constexpr float LOG2_E = 1.44269504f;

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

// What one register holds. Compilers keep wider vectors in memory, so loops over many sums are written in these: PARTS
// of them are a vec.
#if HAS_AVX512
constexpr int PART_LANES = 16;
#elif defined(__AVX__)
constexpr int PART_LANES = 8;
#else
constexpr int PART_LANES = 4;
#endif
constexpr int PARTS = LANES / PART_LANES;
typedef float part __attribute__((vector_size(4 * PART_LANES)));
typedef int32_t ipart __attribute__((vector_size(4 * PART_LANES)));

inline part load_part(const float* from) {
    part result;
    std::memcpy(&result, from, sizeof result);
    return result;
}

inline void store_part(float* to, part value) { std::memcpy(to, &value, sizeof value); }

inline part widen_part(const float* from) { return load_part(from); }

inline part widen_part(const bfloat16* from) {
    typedef uint16_t half __attribute__((vector_size(2 * PART_LANES)));
    half bits;
    std::memcpy(&bits, from, sizeof bits);
    return (part)(__builtin_convertvector(bits, ipart) << 16);
}

inline void narrow_part(float* to, part value) { store_part(to, value); }

// As `narrow`.
inline void narrow_part(bfloat16* to, part value) {
#if HAS_AVX512 && defined(__AVX512BF16__)
    const __m256i result = (__m256i)_mm512_cvtneps_pbh(value);
#else
    typedef uint16_t half __attribute__((vector_size(2 * PART_LANES)));
    const ipart bits = (ipart)value, is_nan = value != value;
    const ipart rounded = bits + 0x7fff + ((bits >> 16) & 1), quiet = bits | 0x400000;
    const half result = __builtin_convertvector(((is_nan & quiet) | (~is_nan & rounded)) >> 16, half);
#endif
    std::memcpy(to, &result, sizeof result);
}

inline part broadcast_part(float value) { return part{} + value; }

inline vec load(const float* from) {
    vec result;
    std::memcpy(&result, from, sizeof result);
    return result;
}

inline void store(float* to, vec value) { std::memcpy(to, &value, sizeof value); }

inline vec load_wide(const float* from) { return load(from); }

inline vec load_wide(const bfloat16* from) {
    typedef uint16_t half __attribute__((vector_size(2 * LANES)));
    half bits;
    std::memcpy(&bits, from, sizeof bits);
    return (vec)(__builtin_convertvector(bits, ivec) << 16);
}

// The first `count` of 16 floats; there may be room for no more.
template <typename T>
inline void store_narrow(T* to, const float* from, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) to[i] = narrow<T>(from[i]);
}

#if HAS_AVX512 && defined(__AVX512BF16__)

inline void store_narrow(bfloat16* to, const float* from, int64_t count) {
    const __mmask16 mask = count >= LANES ? 0xffff : (1u << count) - 1;
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from)));
}

#endif

inline float sum_lanes(vec value) {
    float lanes[LANES];
    store(lanes, value);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

inline part maximum(part a, part b) {
#if HAS_AVX512
    return _mm512_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

inline bool any_differs(part a, part b) {
    const ipart differs = a != b;
    int32_t any = 0;
    for (int i = 0; i < PART_LANES; i++) any |= differs[i];
    return any != 0;
}

// 2^x for x <= 128, where it is infinite: 2^n times a minimax polynomial on [-1/2, 1/2]. Relative error below 2e-7 down
// to 2^-126; what is smaller than that is cut towards 0 with AVX-512, and becomes 2^-126 without.
inline part exp2_part(part x) {
#if HAS_AVX512
    const part n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: adding it rounds
    x = maximum(x, broadcast_part(-126.0f));
    const part n = (x + TO_INTEGER) - TO_INTEGER;
#endif
    const part f = x - n;
    part sum = broadcast_part(1.32764719e-3f);
    for (const float term : {9.67554e-3f, 5.550713e-2f, 2.402212e-1f, 6.9314697e-1f, 1.0f}) sum = sum * f + term;
#if HAS_AVX512
    return _mm512_scalef_ps(sum, n);
#else
    return (part)((ipart)sum + (__builtin_convertvector(n, ipart) << 23));
#endif
}

inline part tanh_part(part x) {
    const ipart sign = (ipart)x & std::numeric_limits<int32_t>::min();
    const part decay = exp2_part((-2.0f * LOG2_E) * (part)((ipart)x ^ sign));
    return (part)((ipart)((1.0f - decay) / (1.0f + decay)) | sign);
}

// rows: 16 rows of 16 elements of 4 bytes, `stride` apart -> to: the columns as contiguous rows.
inline void transpose(const float* rows, int64_t stride, float* to) {
#if HAS_AVX512
    __m512i a[LANES], b[LANES];
    for (int i = 0; i < LANES; i++) a[i] = _mm512_loadu_si512(rows + i * stride);
    for (int i = 0; i < LANES; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    for (int i = 0; i < LANES; i += 8)
        for (int j = 0; j < 4; j++) {
            b[i + j] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0x88);
            b[i + j + 4] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        _mm512_storeu_si512(to + j * LANES, _mm512_shuffle_i32x4(b[j], b[j + 8], 0x88));
        _mm512_storeu_si512(to + (j + 8) * LANES, _mm512_shuffle_i32x4(b[j], b[j + 8], 0xdd));
    }
#else
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) to[j * LANES + i] = rows[i * stride + j];
#endif
}
