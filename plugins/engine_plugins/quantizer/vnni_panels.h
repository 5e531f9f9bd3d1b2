// Products of 16-bit integers with integer weights in panels, a panel of 16 outputs at a time: with AVX512-VNNI, and,
// to be tested anywhere, without.
#pragma once

#include "avx2_panels.h"
#include "vectors.h"

namespace {

// sums + the products of 16 pairs of 16 bits
inline ivec add_pairs(ivec sums, ivec weights, ivec inputs) {
#if defined(__AVX512VNNI__) && !defined(EMULATE)
    return (ivec)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)weights, (__m512i)inputs);
#else
    for (int i = 0; i < LANES; i++) {
        sums[i] += static_cast<int16_t>(weights[i]) * static_cast<int16_t>(inputs[i]);
        sums[i] += (weights[i] >> 16) * (inputs[i] >> 16);
    }
    return sums;
#endif
}

typedef uint16_t halves __attribute__((vector_size(4 * LANES)));

// As ByteWeights and NibbleWeights, for all outputs of a panel.
struct WideBytes : ByteWeights {
    template <int WHICH>
    static ivec pair(ivec raw) {
        return WHICH == 1 ? (ivec)((halves)raw >> 8) : raw & 0x00ff00ff;
    }
};

struct WideNibbles : NibbleWeights {
    template <int WHICH>
    static ivec pair(ivec raw) {
        constexpr int SHIFT = 8 * (WHICH % 2) + 4 * (WHICH / 2);
        return (ivec)((halves)raw >> SHIFT) & 0x000f000f;
    }
};

inline ivec wide_zeros(const GroupScales& scales) {
    if (scales.zero == nullptr) return ivec{} + scales.offset;
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    bytes narrow;
    std::memcpy(&narrow, scales.zero, sizeof narrow);
    return __builtin_convertvector(narrow, ivec);
}

template <typename Format, int ROWS, int VECTORS>
struct WideKernel {
    static constexpr int PANELS = VECTORS / 2;
    static constexpr int BLOCK_ROWS = 8, PAIR_ROWS = 8;
    using Rows = IntegerRows;

    template <int WHICH>
    static void multiply(const ivec (&raw)[PANELS], const int16_t* x, int64_t x_stride, ivec (&sums)[ROWS][PANELS]) {
        ivec weights[PANELS];
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) weights[p] = Format::template pair<WHICH>(raw[p]);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            int32_t both;
            std::memcpy(&both, x + r * x_stride + 2 * WHICH, sizeof both);
            const ivec inputs = ivec{} + both;
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; p++) sums[r][p] = add_pairs(sums[r][p], weights[p], inputs);
        }
    }

    template <int... WHICH>
    static void multiply_all(std::integer_sequence<int, WHICH...>, const ivec (&raw)[PANELS], const int16_t* x,
                             int64_t x_stride, ivec (&sums)[ROWS][PANELS]) {
        (multiply<WHICH>(raw, x, x_stride, sums), ...);
    }

    static ivec load_panel(const uint8_t* from) {
        _mm_prefetch(reinterpret_cast<const char*>(from) + PREFETCH, _MM_HINT_T0);
        ivec result;
        std::memcpy(&result, from, sizeof result);
        return result;
    }

    static void add(const Stretch<VECTORS>& stretch, const IntegerRows& rows, int64_t row, int64_t begin, float* to) {
        const int16_t* x = rows.at(row, begin);
        const int64_t x_stride = rows.at(row + 1, begin) - x, panel_rows = stretch.inputs / Format::INPUTS;
        const float* steps = rows.steps(row, begin);
        const int32_t* totals = rows.totals(row, begin);
        ivec sums[ROWS][PANELS];
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            const ivec zeros = wide_zeros(stretch.scales[p]);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) sums[r][p] = zeros * -totals[r];
        }
        for (int64_t i = 0; i < panel_rows; i++, x += Format::INPUTS) {
            ivec raw[PANELS];
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; p++) raw[p] = load_panel(stretch.panel[p] + i * Format::ROW_STRIDE);
            multiply_all(std::make_integer_sequence<int, Format::INPUTS / 2>(), raw, x, x_stride, sums);
        }
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            const vec scale = load(stretch.scales[p].scale);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                float* at = to + r * PAIR + p * PANEL;
                const vec sum = __builtin_convertvector(sums[r][p], vec) * scale;
                store(at, load(at) + sum * steps[r]);
            }
        }
    }
};

}  // namespace
