// Products of integers with integer weights in panels, a panel of 16 outputs at a time: with AVX512-VNNI, and, to be
// tested anywhere, without. x has 16 bits, or 8 and weights with one scale per output.
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

// sums + the products of 16 times 4 bytes, those of weights unsigned
inline ivec add_quads(ivec sums, ivec weights, ivec inputs) {
#if defined(__AVX512VNNI__) && !defined(EMULATE)
    return (ivec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)inputs);
#else
    for (int i = 0; i < LANES; i++)
        for (int shift = 0; shift < 32; shift += 8)
            sums[i] += (weights[i] >> shift & 0xff) * static_cast<int8_t>(inputs[i] >> shift);
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

struct WideE2m1 : NibbleWeights {
    template <int WHICH>
    static ivec pair(ivec raw) {
#if defined(__AVX512BW__)
        constexpr int SHIFT = 8 * (WHICH % 2) + 4 * (WHICH / 2);
        const __m512i bits = (__m512i)raw;  // as E2m1Weights::pair
        const __m512i high = SHIFT <= 8 ? _mm512_slli_epi16(bits, 8 - SHIFT) : _mm512_srli_epi16(bits, SHIFT - 8);
        const __m512i place = _mm512_or_si512(_mm512_and_si512(high, _mm512_set1_epi16(0x0f00)), _mm512_set1_epi16(0x80));
        const __m512i integers = _mm512_broadcast_i32x4(_mm256_castsi256_si128(E2m1Weights::integers()));
        return (ivec)_mm512_srai_epi16(_mm512_shuffle_epi8(integers, place), 8);
#else
        __m256i halves[2];
        std::memcpy(halves, &raw, sizeof halves);
        for (__m256i& half : halves) half = E2m1Weights::pair<WHICH>(half);
        std::memcpy(&raw, halves, sizeof halves);
        return raw;
#endif
    }
};

// A row of a panel as groups of four bytes.
template <typename Format>
inline ivec quad(ivec raw, int which) {
    if (Format::INPUTS == 4) return raw;
    return which == 0 ? raw & 0x0f0f0f0f : (ivec)((halves)raw >> 4) & 0x0f0f0f0f;
}

inline ivec wide_zeros(const GroupScales& scales) {
    if (scales.zero == nullptr) return ivec{} + scales.offset;
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    bytes narrow;
    std::memcpy(&narrow, scales.zero, sizeof narrow);
    return __builtin_convertvector(narrow, ivec);
}

inline ivec load_panel(const uint8_t* from) {
    _mm_prefetch(reinterpret_cast<const char*>(from) + PREFETCH, _MM_HINT_T0);
    ivec result;
    std::memcpy(&result, from, sizeof result);
    return result;
}

// What products with unscaled codes add up to -> float32, where an output has one scale. sums: [rows][32], of int32
// where x has 8 bits, else of float32 without the zero. Rows: NarrowRows.
template <typename Layer, typename Rows>
void scale_sums(const Layer& layer, const Rows& x, int64_t row, int64_t rows, int64_t pair, float* sums) {
    for (int p = 0; p < 2; p++) {
        const GroupScales scales = layer.scales(2 * pair + p, 0);
        const vec factors = load(scales.scale);
        const ivec zeros = wide_zeros(scales);
        for (int64_t r = row; r < row + rows; r++, sums += PAIR) {
            vec sum = load(sums + p * PANEL);
            if (Rows::BYTES) sum = __builtin_convertvector((ivec)sum - zeros * x.total(r), vec) * x.step(r);
            store(sums + p * PANEL, sum * factors);
        }
        sums -= rows * PAIR;
    }
}

template <typename Format, int ROWS, int VECTORS>
struct WideKernel {
    static constexpr int PANELS = VECTORS / 2;
    static constexpr int BLOCK_ROWS = 12, PAIR_ROWS = 12;
    using Rows = IntegerRows;

    template <int WHICH>
    static void multiply(const ivec (&raw)[PANELS], const int16_t* x, int64_t x_stride, ivec (&sums)[ROWS][PANELS]) {
        ivec weights[PANELS];
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) weights[p] = Format::template pair<WHICH>(raw[p]);
#pragma GCC unroll 12
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

    static void add(const Stretch<VECTORS>& stretch, const IntegerRows& rows, int64_t row, int64_t begin, float* to) {
        const int16_t* x = rows.at(row, begin);
        const int64_t x_stride = rows.at(row + 1, begin) - x, panel_rows = stretch.inputs / Format::INPUTS;
        const float* steps = rows.steps(row, begin);
        const int32_t* totals = rows.totals(row, begin);
        ivec sums[ROWS][PANELS];
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            const ivec zeros = wide_zeros(stretch.scales[p]);
#pragma GCC unroll 12
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
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                float* at = to + r * PAIR + p * PANEL;
                const vec sum = __builtin_convertvector(sums[r][p], vec) * scale;
                store(at, load(at) + sum * steps[r]);
            }
        }
    }
};

// x in 8 bits: sums are int32 until `scale_sums`. Rows: NarrowRows.
template <typename Format>
struct ByteKernel {
    static constexpr int BLOCK_ROWS = 12;  // as many sums as registers hold

    template <int ROWS = BLOCK_ROWS, typename Layer, typename Rows>
    static void add_rows(const Layer& layer, const Rows& x, int64_t stretch, int64_t row, int64_t rows, int64_t pair,
                         int64_t begin, int64_t end, float* to) {
        if (rows < ROWS) {
            if constexpr (ROWS > 1) add_rows<ROWS - 1>(layer, x, stretch, row, rows, pair, begin, end, to);
            return;
        }
        for (int64_t at = begin; at < end; at += stretch) {
            const int64_t offset = at / Format::INPUTS * Format::ROW_STRIDE;
            add<ROWS>(layer.panel(2 * pair) + offset, layer.panel(2 * pair + 1) + offset,
                      std::min(stretch, end - at) / Format::INPUTS, x.at(row, at), x.row_bytes(), at == 0, to);
        }
    }

private:
    template <int ROWS>
    static void add(const uint8_t* first, const uint8_t* second, int64_t panel_rows, const int8_t* x, int64_t x_stride,
                    bool set, float* to) {
        // Each loop over sums is unrolled, or the compiler would keep them in memory.
        ivec sums[ROWS][2];
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            sums[r][0] = set ? ivec{} : (ivec)load(to + r * PAIR);
            sums[r][1] = set ? ivec{} : (ivec)load(to + r * PAIR + PANEL);
        }
        for (int64_t i = 0; i < panel_rows; i++, x += Format::INPUTS) {
            const int64_t offset = i * Format::ROW_STRIDE;
            const ivec raw[2] = {load_panel(first + offset), load_panel(second + offset)};
#pragma GCC unroll 2
            for (int q = 0; q < Format::INPUTS / 4; q++) {
                const ivec weights[2] = {quad<Format>(raw[0], q), quad<Format>(raw[1], q)};
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; r++) {
                    int32_t four;
                    std::memcpy(&four, x + r * x_stride + 4 * q, sizeof four);
                    const ivec inputs = ivec{} + four;
                    sums[r][0] = add_quads(sums[r][0], weights[0], inputs);
                    sums[r][1] = add_quads(sums[r][1], weights[1], inputs);
                }
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            store(to + r * PAIR, (vec)sums[r][0]);
            store(to + r * PAIR + PANEL, (vec)sums[r][1]);
        }
    }
};

}  // namespace
