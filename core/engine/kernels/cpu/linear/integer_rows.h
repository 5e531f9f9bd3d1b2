// Rows of x as integer kernels multiply them, laid out as in float_rows.h.
#pragma once

#include <immintrin.h>

#include "float_rows.h"

namespace {

// Integers of 16 bits: x ~ value * step. Inputs 4 i .. 4 i + 3 lie in the order 0, 2, 1, 3, as the kernels pair them.
// Without `byte_levels` a stretch has a step of its own, a power of two: bfloat16 elements down to 1/128 of the
// stretch's largest are exact, smaller ones are rounded to 2^-15 of it. With it, a row is rounded to 255 levels, as
// activations of 8 bits. Where a row has an infinity or a NaN, its step is NaN.
class IntegerRows {
public:
    template <typename C>
    IntegerRows(const C&, const RowShape& shape, int64_t rows, bool byte_levels)
        : shape_(shape), rows_(rows), byte_levels_(byte_levels) {
        thread_local Scratch values, steps, totals;
        const int64_t count = stretches(shape) * rows;
        values_ = static_cast<int16_t*>(values.take(sizeof(int16_t) * count * shape.stretch));
        steps_ = static_cast<float*>(steps.take(sizeof(float) * count));
        totals_ = static_cast<int32_t*>(totals.take(sizeof(int32_t) * count));
    }

    template <typename C>
    void prepare(const C& call, int64_t first, int64_t last) {
        prepare_rows(shape_, first, last, [&](int64_t row, float* wide) {
            widen_row(shape_, call.x + row * call.x_stride, wide);
            if (byte_levels_)
                round_row(wide, row - first);
            else
                round_stretches(wide, row - first);
        });
    }

    const int16_t* at(int64_t row, int64_t begin) const { return values_ + index(row, begin) * shape_.stretch; }
    // Of this row and, one after another, of the next ones.
    const float* steps(int64_t row, int64_t begin) const { return steps_ + index(row, begin); }
    const int32_t* totals(int64_t row, int64_t begin) const { return totals_ + index(row, begin); }  // sums of integers

private:
    int64_t index(int64_t row, int64_t begin) const { return begin / shape_.stretch * rows_ + row; }

    void round_row(const float* wide, int64_t row) {
        float largest, step;
        const uint32_t bits = largest_bits(wide, shape_.padded);
        std::memcpy(&largest, &bits, sizeof bits);
        step = bits >= NOT_FINITE ? NAN_ : std::max(largest / 127.0f, 1e-20f);
        for (int64_t begin = 0; begin < shape_.padded; begin += shape_.stretch)
            store(wide, row, begin, step, [step](__m256 x) { return _mm256_div_ps(x, _mm256_set1_ps(step)); });
    }

    void round_stretches(const float* wide, int64_t row) {
        for (int64_t begin = 0; begin < shape_.padded; begin += shape_.stretch) {
            const int64_t count = std::min(shape_.stretch, shape_.padded - begin);
            const uint32_t bits = largest_bits(wide + begin, count);
            // The largest is below 2^(exponent - 126); the step is that times 2^-15.
            const uint32_t exponent = std::max<uint32_t>(bits >> 23, 15);
            const float step = bits >= NOT_FINITE ? NAN_ : power(exponent - 14);
            const float inverse = bits >= NOT_FINITE ? 0.0f : power(268 - exponent);
            store(wide, row, begin, step, [inverse](__m256 x) { return _mm256_mul_ps(x, _mm256_set1_ps(inverse)); });
        }
    }

    static constexpr uint32_t NOT_FINITE = 0x7f800000u;
    static constexpr float NAN_ = __builtin_nanf("");

    static float power(uint32_t biased) {
        const uint32_t bits = biased << 23;
        float result;
        std::memcpy(&result, &bits, sizeof result);
        return result;
    }

    // Of magnitudes; those of infinities and NaNs are above all others.
    static uint32_t largest_bits(const float* from, int64_t count) {
        __m256i largest = _mm256_setzero_si256();
        const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
        for (int64_t i = 0; i < count; i += 8) {
            const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
            largest = _mm256_max_epu32(largest, _mm256_and_si256(bits, magnitude));
        }
        alignas(32) uint32_t lanes[8];
        _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), largest);
        return *std::max_element(lanes, lanes + 8);
    }

    template <typename Divide>
    void store(const float* wide, int64_t row, int64_t begin, float step, Divide divide) {
        const int64_t end = std::min(shape_.padded, begin + shape_.stretch);
        const __m256i turn = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));  // 0, 2, 1, 3
        int16_t* to = values_ + index(row, begin) * shape_.stretch;
        __m256i total = _mm256_setzero_si256();
        for (int64_t i = begin; i < end; i += 16, to += 16) {
            const __m256i low = _mm256_cvtps_epi32(divide(_mm256_loadu_ps(wide + i)));
            const __m256i high = _mm256_cvtps_epi32(divide(_mm256_loadu_ps(wide + i + 8)));
            const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
            total = _mm256_add_epi32(total, _mm256_madd_epi16(both, _mm256_set1_epi16(1)));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_shuffle_epi8(both, turn));
        }
        alignas(32) int32_t lanes[8];
        _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), total);
        int32_t sum = 0;
        for (const int32_t lane : lanes) sum += lane;
        steps_[index(row, begin)] = step;
        totals_[index(row, begin)] = sum;
    }

    RowShape shape_;
    int64_t rows_;
    bool byte_levels_;
    int16_t* values_;
    float* steps_;
    int32_t* totals_;
};

}  // namespace
