// Products of many rows with quantized weights in panels, in AMX tiles of 16 rows, 16 outputs and 64 bytes of inputs.
//
// x in bfloat16 is multiplied as it is: weights of a stretch are unpacked to bfloat16, which holds code - zero exactly,
// once for all rows of a group. x in 8 bits is multiplied with the codes, exactly.
#pragma once

#include "amx.h"
#include "avx2_panels.h"
#include "narrow_rows.h"
#include "vectors.h"
#include "vnni_panels.h"

#if HAS_AMX || defined(EMULATE)

namespace {

constexpr int64_t TILE_BLOCK = 2 * TILE_ROWS;  // rows that are multiplied together

// --- Weights as tiles take them --------------------------------------------------------------------------------------

// The weights of one input of 16 outputs, not yet scaled, in float32: bfloat16 holds them, so the lower halves are
// zeros. base: what turns 2^23 + code into code - zero.
template <typename Format, int INPUT>
inline ivec unpacked(ivec raw, vec base) {
    constexpr int BITS = 32 / Format::INPUTS, SHIFT = 8 * (INPUT % 4) + BITS * (INPUT / 4);
    typedef uint32_t words __attribute__((vector_size(4 * LANES)));
    if (std::is_same_v<Format, E4m3Weights>)
        return (ivec)((vec)(((ivec)((words)raw << (24 - SHIFT)) >> 4) & static_cast<int32_t>(0x87f00000)) * 0x1p120f);
    if (std::is_same_v<Format, E2m1Weights>) {
#if HAS_AVX512
        const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
        return (ivec)_mm512_permutexvar_ps((__m512i)((words)raw >> SHIFT), values);  // by the lowest four bits
#else
        // 0, 1; from 2 on an exponent and a bit of mantissa: 2 or 3 times a power of two
        const words code = (words)raw >> SHIFT & 7, exponent = code >> 1;
        const words integer = (words)(exponent > 0) & ((code & 1) | 2) << (exponent - 1 & 3) |
                              (words)(exponent == 0) & code;
        const words sign = (words)raw << (28 - SHIFT) & 0x80000000u;
        return (ivec)((words)__builtin_convertvector((ivec)integer, vec) | sign);
#endif
    }
    constexpr int32_t BITS_OF_2_23 = 0x4b000000;  // as float32
    return (ivec)((vec)(((ivec)((words)raw >> SHIFT) & ((1 << BITS) - 1)) | BITS_OF_2_23) - base);
}

template <typename Format, int... PAIRS>
inline void unpack_row(std::integer_sequence<int, PAIRS...>, ivec raw, vec base, uint8_t* to) {
    typedef uint32_t words __attribute__((vector_size(4 * LANES)));
    const words pairs[] = {(words)unpacked<Format, 2 * PAIRS>(raw, base) >> 16 |
                           (words)unpacked<Format, 2 * PAIRS + 1>(raw, base)...};
    std::memcpy(to, pairs, sizeof pairs);
}

// A panel's stretch -> [inputs / 2][16][2] bfloat16
template <typename Format>
void unpack_bfloat16(const uint8_t* panel, const GroupScales& scales, int64_t inputs, uint8_t* to) {
    const vec base = __builtin_convertvector(wide_zeros(scales), vec) + 0x1p23f;
    for (int64_t i = 0; i < inputs; i += Format::INPUTS, panel += Format::ROW_STRIDE) {
        ivec raw;
        std::memcpy(&raw, panel, sizeof raw);
        unpack_row<Format>(std::make_integer_sequence<int, Format::INPUTS / 2>(), raw, base, to);
        to += Format::INPUTS / 2 * TILE_ROW_BYTES;
    }
}

// A panel's stretch of codes of 4 bits -> [inputs / 4][16][4] bytes
inline void unpack_nibbles(const uint8_t* panel, int64_t inputs, uint8_t* to) {
    for (int64_t i = 0; i < inputs; i += 8, panel += NibbleWeights::ROW_STRIDE, to += 2 * TILE_ROW_BYTES) {
        ivec raw;
        std::memcpy(&raw, panel, sizeof raw);
        const ivec low = raw & 0x0f0f0f0f, high = (raw >> 4) & 0x0f0f0f0f;
        std::memcpy(to, &low, sizeof low);
        std::memcpy(to + TILE_ROW_BYTES, &high, sizeof high);
    }
}

// --- Products --------------------------------------------------------------------------------------------------------

// A macro: intrinsics take numbers of tiles that are written out.
#define ADD_TILE(SUMS, X, WEIGHTS)            \
    if constexpr (BYTES)                      \
        _tile_dpbsud(SUMS, X, WEIGHTS);       \
    else                                      \
        _tile_dpbf16ps(SUMS, X, WEIGHTS)

// Element: bfloat16 or int8_t, of x. Layer: as for PairOfPanels.
template <typename Format, typename Element, typename Layer>
class TileKernel {
    static constexpr bool BYTES = sizeof(Element) == 1;
    static constexpr bool IN_PLACE = BYTES && Format::INPUTS == 4;  // codes already lie as tiles take them
    static constexpr int TILE_INPUTS = TILE_ROW_BYTES / sizeof(Element);

public:
    using Rows = NarrowRows<Element>;

    static constexpr int64_t UNPACKED = 512 / sizeof(Element);  // inputs unpacked together: at least a stretch

    ~TileKernel() { _tile_release(); }  // else every context switch would save the tiles

    // One scale for all inputs of an output: `sums` are what tiles add up, until `scale_sums`.
    void add_unscaled(const Layer& layer, const Rows& x, int64_t stretch, int64_t row, int64_t rows, int64_t pair,
                      int64_t begin, int64_t end, float* sums) {
        set_rows(rows);
        for_stretches(layer, stretch, pair, begin, end, [&](const uint8_t* const(&weights)[2], int64_t at, int64_t n) {
            multiply(weights, x, row, at, n, rows > TILE_ROWS, at == 0, sums);
        });
    }

    void add(const Layer& layer, const Rows& x, int64_t stretch, int64_t row, int64_t rows, int64_t pair, int64_t begin,
             int64_t end, float* sums) {
        set_rows(rows);
        for_stretches(layer, stretch, pair, begin, end, [&](const uint8_t* const(&weights)[2], int64_t at, int64_t n) {
            multiply(weights, x, row, at, n, rows > TILE_ROWS, true, products_);
            for (int p = 0; p < 2; p++) scale(layer.scales(2 * pair + p, at), x, row, rows, at, p * PANEL, sums);
        });
    }

private:
    // Tiles 0 .. 3: sums (rows x panels, 2 x 2). 4, 5: x. 6, 7: weights.
    void set_rows(int64_t rows) {
        if (rows == rows_) return;
        rows_ = rows;
        const int upper = static_cast<int>(std::min<int64_t>(rows, TILE_ROWS));
        const int lower = std::max(1, static_cast<int>(rows) - TILE_ROWS);
        shape_tiles({upper, upper, lower, lower, upper, lower, TILE_ROWS, TILE_ROWS});
    }

    // take(weights of both panels, first input, inputs)
    template <typename Take>
    void for_stretches(const Layer& layer, int64_t stretch, int64_t pair, int64_t begin, int64_t end, Take take) {
        const int64_t together = UNPACKED / stretch * stretch;
        for (int64_t chunk = begin; chunk < end; chunk += together) {
            const int64_t chunk_end = std::min(end, chunk + together);
            if (!IN_PLACE) unpack(layer, stretch, pair, chunk, chunk_end);
            for (int64_t at = chunk; at < chunk_end; at += stretch) {
                const uint8_t* weights[2];
                for (int p = 0; p < 2; p++)
                    weights[p] = IN_PLACE ? layer.panel(2 * pair + p) + at / Format::INPUTS * Format::ROW_STRIDE
                                          : unpacked_[p] + (at - chunk) * PANEL * sizeof(Element);
                take(weights, at, std::min(stretch, chunk_end - at));
            }
        }
    }

    // Once for all rows of a group, which pass by one block after another.
    void unpack(const Layer& layer, int64_t stretch, int64_t pair, int64_t begin, int64_t end) {
        if (pair == pair_ && begin == begin_) return;
        pair_ = pair, begin_ = begin;
        for (int p = 0; p < 2; p++) {
            const uint8_t* panel = layer.panel(2 * pair + p);
            for (int64_t at = begin; at < end; at += stretch) {
                const uint8_t* from = panel + at / Format::INPUTS * Format::ROW_STRIDE;
                uint8_t* to = unpacked_[p] + (at - begin) * PANEL * sizeof(Element);
                const int64_t inputs = std::min(stretch, end - at);
                if constexpr (BYTES)
                    unpack_nibbles(from, inputs, to);
                else
                    unpack_bfloat16<Format>(from, layer.scales(2 * pair + p, at), inputs, to);
            }
        }
        written(unpacked_);
    }

    // to: [32][32] of float or int32, set or added to
    void multiply(const uint8_t* const (&weights)[2], const Rows& x, int64_t row, int64_t begin, int64_t inputs,
                  bool two_tiles, bool set, float* to) {
        constexpr int64_t STRIDE = IN_PLACE ? Format::ROW_STRIDE : TILE_ROW_BYTES;
        constexpr int SUM_BYTES = PAIR * sizeof(float);
        float* lower_sums = to + TILE_ROWS * PAIR;
        if (set) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        } else {
            written(to);
            _tile_loadd(0, to, SUM_BYTES);
            _tile_loadd(1, to + PANEL, SUM_BYTES);
            if (two_tiles) {
                _tile_loadd(2, lower_sums, SUM_BYTES);
                _tile_loadd(3, lower_sums + PANEL, SUM_BYTES);
            }
        }
        const Element *upper = x.at(row, begin), *lower = two_tiles ? x.at(row + TILE_ROWS, begin) : upper;
        for (int64_t k = 0; k < inputs; k += TILE_INPUTS) {
            const int64_t at = k / TILE_INPUTS * TILE_ROWS * STRIDE;
            _tile_loadd(4, upper + k, x.row_bytes());
            _tile_loadd(6, weights[0] + at, STRIDE);
            ADD_TILE(0, 4, 6);
            _tile_loadd(7, weights[1] + at, STRIDE);
            ADD_TILE(1, 4, 7);
            if (two_tiles) {
                _tile_loadd(5, lower + k, x.row_bytes());
                ADD_TILE(2, 5, 6);
                ADD_TILE(3, 5, 7);
            }
        }
        _tile_stored(0, to, SUM_BYTES);
        _tile_stored(1, to + PANEL, SUM_BYTES);
        if (two_tiles) {
            _tile_stored(2, lower_sums, SUM_BYTES);
            _tile_stored(3, lower_sums + PANEL, SUM_BYTES);
        }
    }

    void scale(const GroupScales& scales, const Rows& x, int64_t row, int64_t rows, int64_t begin, int first,
               float* sums) const {
        const vec factors = load(scales.scale);
        const ivec zeros = wide_zeros(scales);
        for (int64_t r = 0; r < rows; r++) {
            const float* product = products_ + r * PAIR + first;
            float* to = sums + r * PAIR + first;
            if constexpr (BYTES) {
                const ivec sum = (ivec)load(product) - zeros * x.total(row + r, begin);
                store(to, load(to) + __builtin_convertvector(sum, vec) * factors * x.step(row + r));
            } else {
                store(to, load(to) + load(product) * factors);
            }
        }
    }

    int64_t rows_ = 0, pair_ = -1, begin_ = -1;
    alignas(64) float products_[TILE_BLOCK * PAIR];
    alignas(64) uint8_t unpacked_[2][UNPACKED * PANEL * sizeof(Element)];
};

}  // namespace

#endif
