// Products of rows with weights in panels, with AVX2 and FMA, for every format of weights.
//
// A panel row of 64 bytes holds a few consecutive inputs of 16 outputs: output o has the 32 bits at 4 o. A vector of 32
// bytes is half of it. A format says how many inputs that is, and takes them out of a vector. A row's result has the
// same additions in the same order whatever the number of rows.
#pragma once

#include <immintrin.h>

#include <utility>

#include "integer_rows.h"

namespace {

constexpr int LANES8 = 8;         // outputs of a vector
constexpr int PANEL_ROW = 64;   // bytes
constexpr int PREFETCH = 2048;  // bytes ahead: the hardware prefetcher stops at every page

// --- Formats: INPUTS of a panel row, bytes from one row of a panel to the next ---------------------------------------

// Four unsigned bytes: the code is byte - zero.
struct ByteWeights {
    static constexpr int INPUTS = 4;
    static constexpr int ROW_STRIDE = 2 * PANEL_ROW;

    template <int INPUT>
    static __m256 wide(__m256i raw, __m256i zero) {
        __m256i byte = INPUT > 0 ? _mm256_srli_epi32(raw, 8 * INPUT) : raw;
        if (INPUT < 3) byte = _mm256_and_si256(byte, _mm256_set1_epi32(0xff));
        return _mm256_cvtepi32_ps(_mm256_sub_epi32(byte, zero));
    }

    // Two inputs in 16 bits each, as IntegerRows pairs them: 0 and 2, 1 and 3.
    template <int WHICH>
    static __m256i pair(__m256i raw) {
        if (WHICH == 1) return _mm256_srli_epi16(raw, 8);
        return _mm256_and_si256(raw, _mm256_set1_epi16(0xff));
    }
};

// Eight unsigned codes of 4 bits: inputs 0 .. 3 in the lower halves of the bytes, 4 .. 7 in the upper ones.
struct NibbleWeights {
    static constexpr int INPUTS = 8;
    static constexpr int ROW_STRIDE = 2 * PANEL_ROW;

    template <int INPUT>
    static __m256 wide(__m256i raw, __m256i zero) {
        constexpr int SHIFT = 8 * (INPUT % 4) + 4 * (INPUT / 4);
        __m256i code = SHIFT > 0 ? _mm256_srli_epi32(raw, SHIFT) : raw;
        if (SHIFT < 28) code = _mm256_and_si256(code, _mm256_set1_epi32(0xf));
        return _mm256_cvtepi32_ps(_mm256_sub_epi32(code, zero));
    }

    template <int WHICH>
    static __m256i pair(__m256i raw) {
        constexpr int SHIFT = 8 * (WHICH % 2) + 4 * (WHICH / 2);
        const __m256i code = SHIFT > 0 ? _mm256_srli_epi16(raw, SHIFT) : raw;
        return SHIFT < 12 ? _mm256_and_si256(code, _mm256_set1_epi16(0xf)) : code;
    }
};

// Eight numbers of a sign, 2 bits of exponent and 1 of mantissa, where NibbleWeights has codes. Twice the numbers are
// integers: those are multiplied, and scales are half as large.
struct E2m1Weights : NibbleWeights {
    template <int INPUT>
    static __m256 wide(__m256i raw, __m256i) {
        constexpr int SHIFT = 8 * (INPUT % 4) + 4 * (INPUT / 4);
        const __m256 values = _mm256_setr_ps(0, 1, 2, 3, 4, 6, 8, 12);
        const __m256i code = SHIFT > 0 ? _mm256_srli_epi32(raw, SHIFT) : raw;  // three bits of it are the place
        const __m256i sign = SHIFT < 28 ? _mm256_slli_epi32(raw, 28 - SHIFT) : raw;
        const __m256 magnitude = _mm256_permutevar8x32_ps(values, code);
        return _mm256_or_ps(magnitude, _mm256_and_ps(_mm256_castsi256_ps(sign), _mm256_set1_ps(-0.0f)));
    }

    template <int WHICH>
    static __m256i pair(__m256i raw) {
        constexpr int SHIFT = 8 * (WHICH % 2) + 4 * (WHICH / 2);
        // The code in the upper byte of each 16 bits, and nothing in the lower one; then its integer, moved down.
        const __m256i high = SHIFT <= 8 ? _mm256_slli_epi16(raw, 8 - SHIFT) : _mm256_srli_epi16(raw, SHIFT - 8);
        const __m256i place = _mm256_or_si256(_mm256_and_si256(high, _mm256_set1_epi16(0x0f00)), _mm256_set1_epi16(0x80));
        return _mm256_srai_epi16(_mm256_shuffle_epi8(integers(), place), 8);
    }

    static __m256i integers() {
        return _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    }
};

// Four floating-point numbers of a sign, 4 bits of exponent and 3 of mantissa.
struct E4m3Weights {
    static constexpr int INPUTS = 4;
    static constexpr int ROW_STRIDE = 2 * PANEL_ROW;

    template <int INPUT>
    static __m256 wide(__m256i raw, __m256i) {
        // Exponent and mantissa where float32 has them; its bias is larger by 120. Subnormals come out right.
        const __m256i top = INPUT < 3 ? _mm256_slli_epi32(raw, 24 - 8 * INPUT) : raw;
        const __m256i bits = _mm256_and_si256(_mm256_srai_epi32(top, 4), _mm256_set1_epi32(0x87f00000));
        return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));
    }
};

// --- Micro-kernels: one stretch of ROWS rows and VECTORS vectors of outputs ------------------------------------------

// What a layer with scales has for one panel and one group of inputs.
struct GroupScales {
    const float* scale;   // [16]
    const uint8_t* zero;  // [16], or null: all are `offset`
    int offset;

    __m256 scales(int half) const { return _mm256_loadu_ps(scale + half * LANES8); }
    __m256i zeros(int half) const {
        if (zero == nullptr) return _mm256_set1_epi32(offset);
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(zero + half * LANES8)));
    }
};

template <int VECTORS>
struct Stretch {
    static constexpr int PANELS = VECTORS / 2;

    const uint8_t* panel[PANELS];  // the first row
    GroupScales scales[PANELS];
    int64_t inputs;

    // Vector v is half v % 2 of panel v / 2.
    __m256i load(int v, int64_t offset) const {
        const uint8_t* from = panel[v / 2] + offset;
        if (v % 2 == 0) _mm_prefetch(reinterpret_cast<const char*>(from) + PREFETCH, _MM_HINT_T0);
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + v % 2 * 32));
    }
};

template <typename Format, int ROWS, int VECTORS>
struct FloatKernel {
    static constexpr int BLOCK_ROWS = 5, PAIR_ROWS = 2;
    using Rows = FloatRows;

    template <int INPUT>
    static void multiply(const __m256i (&raw)[VECTORS], const __m256i (&zeros)[VECTORS], const float* x,
                         int64_t x_stride, __m256 (&sums)[ROWS][VECTORS]) {
        __m256 weights[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) weights[v] = Format::template wide<INPUT>(raw[v], zeros[v]);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const __m256 input = _mm256_broadcast_ss(x + r * x_stride + INPUT);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[r][v] = _mm256_fmadd_ps(weights[v], input, sums[r][v]);
        }
    }

    template <int... INPUT>
    static void multiply_all(std::integer_sequence<int, INPUT...>, const __m256i (&raw)[VECTORS],
                             const __m256i (&zeros)[VECTORS], const float* x, int64_t x_stride,
                             __m256 (&sums)[ROWS][VECTORS]) {
        (multiply<INPUT>(raw, zeros, x, x_stride, sums), ...);
    }

    static void add(const Stretch<VECTORS>& stretch, const FloatRows& rows, int64_t row, int64_t begin, float* to) {
        const float* x = rows.at(row, begin);
        const int64_t x_stride = rows.at(row + 1, begin) - x, panel_rows = stretch.inputs / Format::INPUTS;
        __m256 sums[ROWS][VECTORS];
        __m256i zeros[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            zeros[v] = stretch.scales[v / 2].zeros(v % 2);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) sums[r][v] = _mm256_setzero_ps();
        }
        for (int64_t i = 0; i < panel_rows; i++, x += Format::INPUTS) {
            __m256i raw[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) raw[v] = stretch.load(v, i * Format::ROW_STRIDE);
            multiply_all(std::make_integer_sequence<int, Format::INPUTS>(), raw, zeros, x, x_stride, sums);
        }
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const __m256 scale = stretch.scales[v / 2].scales(v % 2);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                float* at = to + r * PAIR + v * LANES8;
                _mm256_storeu_ps(at, _mm256_fmadd_ps(sums[r][v], scale, _mm256_loadu_ps(at)));
            }
        }
    }
};

// Exact in int32: with 16 bits of x and differences of 8 bits and a sign, up to 256 inputs fit.
template <typename Format, int ROWS, int VECTORS>
struct IntegerKernel {
    static constexpr int BLOCK_ROWS = 6, PAIR_ROWS = 2;
    using Rows = IntegerRows;

    template <int WHICH>
    static void multiply(const __m256i (&raw)[VECTORS], const int16_t* x, int64_t x_stride,
                         __m256i (&sums)[ROWS][VECTORS]) {
        __m256i weights[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) weights[v] = Format::template pair<WHICH>(raw[v]);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            int32_t both;
            std::memcpy(&both, x + r * x_stride + 2 * WHICH, sizeof both);
            const __m256i inputs = _mm256_set1_epi32(both);
            // All products, then all additions: in another order the scheduler gives additions the ports of products.
            __m256i products[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) products[v] = _mm256_madd_epi16(weights[v], inputs);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) asm volatile("" : "+x"(products[v]));
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                __m256i sum = _mm256_add_epi32(sums[r][v], products[v]);
                asm volatile("" : "+x"(sum));
                sums[r][v] = sum;
            }
        }
    }

    template <int... WHICH>
    static void multiply_all(std::integer_sequence<int, WHICH...>, const __m256i (&raw)[VECTORS], const int16_t* x,
                             int64_t x_stride, __m256i (&sums)[ROWS][VECTORS]) {
        (multiply<WHICH>(raw, x, x_stride, sums), ...);
    }

    static void add(const Stretch<VECTORS>& stretch, const IntegerRows& rows, int64_t row, int64_t begin, float* to) {
        const int16_t* x = rows.at(row, begin);
        const int64_t x_stride = rows.at(row + 1, begin) - x, panel_rows = stretch.inputs / Format::INPUTS;
        const float* steps = rows.steps(row, begin);
        const int32_t* totals = rows.totals(row, begin);
        __m256i sums[ROWS][VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const __m256i zeros = stretch.scales[v / 2].zeros(v % 2);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)  // - zero * sum of x
                sums[r][v] = _mm256_mullo_epi32(zeros, _mm256_set1_epi32(-totals[r]));
        }
        for (int64_t i = 0; i < panel_rows; i++, x += Format::INPUTS) {
            __m256i raw[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) raw[v] = stretch.load(v, i * Format::ROW_STRIDE);
            multiply_all(std::make_integer_sequence<int, Format::INPUTS / 2>(), raw, x, x_stride, sums);
        }
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const __m256 scale = stretch.scales[v / 2].scales(v % 2);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const __m256 sum = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[r][v]), scale);
                const __m256 step = _mm256_set1_ps(steps[r]);
                float* at = to + r * PAIR + v * LANES8;
                _mm256_storeu_ps(at, _mm256_fmadd_ps(sum, step, _mm256_loadu_ps(at)));
            }
        }
    }
};

// --- All inputs of a block of rows and a pair of panels --------------------------------------------------------------

// Layer: gives `GroupScales scales(panel, begin)` and `const uint8_t* panel(index)`. A kernel takes up to BLOCK_ROWS
// rows, both panels at once for up to PAIR_ROWS of them: as many sums as there are registers.
template <typename Format, template <typename, int, int> class Kernel, typename Layer>
struct PairOfPanels {
    static constexpr int64_t BLOCK_ROWS = Kernel<Format, 1, 2>::BLOCK_ROWS;

    template <int ROWS, int VECTORS, typename Rows>
    static void add(const Layer& layer, const Rows& rows, int64_t stretch_inputs, int64_t row, int64_t pair,
                    int64_t begin, int64_t end, float* sums) {
        for (; begin < end; begin += stretch_inputs) {
            for (int first = 0; first < 4; first += VECTORS) {
                Stretch<VECTORS> stretch;
                for (int p = 0; p < VECTORS / 2; p++) {
                    const int64_t panel = 2 * pair + first / 2 + p;
                    stretch.panel[p] = layer.panel(panel) + begin / Format::INPUTS * Format::ROW_STRIDE;
                    stretch.scales[p] = layer.scales(panel, begin);
                }
                stretch.inputs = std::min(stretch_inputs, end - begin);
                Kernel<Format, ROWS, VECTORS>::add(stretch, rows, row, begin, sums + first * LANES8);
            }
        }
    }

    template <int ROWS = BLOCK_ROWS, typename Rows>
    static void add_rows(const Layer& layer, const Rows& rows, int64_t stretch, int64_t row, int64_t count,
                         int64_t pair, int64_t begin, int64_t end, float* sums) {
        constexpr int VECTORS = ROWS <= Kernel<Format, 1, 2>::PAIR_ROWS ? 4 : 2;
        if (count == ROWS) return add<ROWS, VECTORS>(layer, rows, stretch, row, pair, begin, end, sums);
        if constexpr (ROWS > 1) add_rows<ROWS - 1>(layer, rows, stretch, row, count, pair, begin, end, sums);
    }

    static int64_t block(int64_t rows) { return block_of<BLOCK_ROWS>(rows); }
};

}  // namespace
