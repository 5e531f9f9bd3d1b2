// Products of many rows with quantized weights in panels, in AMX tiles of 16 rows, 16 outputs and 64 bytes of inputs.
//
// x in bfloat16 is multiplied as it is: weights of a stretch are unpacked to bfloat16, which holds code - zero exactly,
// once for all rows of a group. x in 8 bits is multiplied with the codes, exactly.
#pragma once

#include <cmath>

#include "amx.h"
#include "avx2_panels.h"
#include "vectors.h"
#include "vnni_panels.h"

#if HAS_AMX || defined(EMULATE)

namespace {

constexpr int64_t TILE_BLOCK = 2 * TILE_ROWS;  // rows that are multiplied together

// --- Rows of x, laid out as in float_rows.h ---------------------------------------------------------------------------

template <typename Element>
class TileRows {
public:
    template <typename C>
    TileRows(const C&, const RowShape& shape, int64_t rows, bool) : shape_(shape), rows_(rows) {
        thread_local Scratch values, steps, totals, row_totals;
        const int64_t count = stretches(shape) * rows;
        values_ = static_cast<Element*>(values.take(sizeof(Element) * count * shape.stretch));
        steps_ = static_cast<float*>(steps.take(sizeof(float) * rows));
        totals_ = static_cast<int32_t*>(totals.take(sizeof(int32_t) * count));
        row_totals_ = static_cast<int32_t*>(row_totals.take(sizeof(int32_t) * rows));
    }

    // All threads of a team together. Implies a barrier before and after.
    template <typename C>
    void prepare(const C& call, int64_t first, int64_t last) {
        thread_local Scratch scratch;
        float* wide = static_cast<float*>(scratch.take(sizeof(float) * shape_.padded));
        if (first > 0) {
#pragma omp barrier
        }
#pragma omp for
        for (int64_t row = first; row < last; row++) {
            widen_row(shape_, call.x + row * call.x_stride, wide);
            if (sizeof(Element) == 1) steps_[row - first] = round(wide);
            int32_t total = 0;
            for (int64_t begin = 0; begin < shape_.padded; begin += shape_.stretch)
                total += store(wide, row - first, begin);
            row_totals_[row - first] = total;
        }
    }

    const Element* at(int64_t row, int64_t begin) const { return values_ + index(row, begin) * shape_.stretch; }
    int64_t row_bytes() const { return shape_.stretch * sizeof(Element); }
    float step(int64_t row) const { return steps_[row]; }
    int32_t total(int64_t row, int64_t begin) const { return totals_[index(row, begin)]; }  // of a stretch's integers
    int32_t total(int64_t row) const { return row_totals_[row]; }

private:
    int64_t index(int64_t row, int64_t begin) const { return begin / shape_.stretch * rows_ + row; }

    // In place, to integers of 255 levels; NaN for a row with an infinity or a NaN.
    float round(float* wide) const {
        constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: adding it rounds
        constexpr int32_t INFINITE = 0x7f800000;
        ipart largest = {};  // of magnitudes, as bits: those of infinities and NaNs are above all others
        for (int64_t i = 0; i < shape_.padded; i += PART_LANES) {
            const ipart bits = (ipart)load_part(wide + i) & 0x7fffffff;
            largest = bits > largest ? bits : largest;
        }
        int32_t bits = 0;
        for (int lane = 0; lane < PART_LANES; lane++) bits = std::max(bits, largest[lane]);
        float step;
        std::memcpy(&step, &bits, sizeof step);
        step = std::max(step / 127.0f, 1e-20f);
        const part zero = {};
        for (int64_t i = 0; i < shape_.padded; i += PART_LANES) {
            const part rounded = (load_part(wide + i) / step + TO_INTEGER) - TO_INTEGER;
            store_part(wide + i, bits < INFINITE ? rounded : zero);
        }
        return bits < INFINITE ? step : __builtin_nanf("");
    }

    // Returns the sum of integers.
    int32_t store(const float* wide, int64_t row, int64_t begin) {
        const int64_t count = std::min(shape_.stretch, shape_.padded - begin);
        Element* to = values_ + index(row, begin) * shape_.stretch;
        int32_t total = 0;
        if constexpr (sizeof(Element) == 1) {
#pragma omp simd reduction(+ : total)
            for (int64_t i = 0; i < count; i++) {
                const int32_t value = static_cast<int32_t>(wide[begin + i]);
                to[i] = static_cast<int8_t>(value);
                total += value;
            }
        } else {
            for (int64_t i = 0; i < count; i += PART_LANES) narrow_part(to + i, load_part(wide + begin + i));
        }
        totals_[index(row, begin)] = total;
        return total;
    }

    RowShape shape_;
    int64_t rows_;
    Element* values_;
    float* steps_;
    int32_t *totals_, *row_totals_;
};

// --- Weights as tiles take them --------------------------------------------------------------------------------------

// The weights of one input of 16 outputs, not yet scaled.
template <typename Format>
inline vec unpacked(ivec raw, int input, ivec zeros) {
    constexpr int BITS = 32 / Format::INPUTS;
    const int shift = 8 * (input % 4) + BITS * (input / 4);
    typedef uint32_t words __attribute__((vector_size(4 * LANES)));
    if (std::is_same_v<Format, E4m3Weights>)
        return (vec)((((ivec)((words)raw << (24 - shift))) >> 4) & static_cast<int32_t>(0x87f00000)) * 0x1p120f;
    const ivec code = (ivec)((words)raw >> shift) & ((1 << BITS) - 1);
    return __builtin_convertvector(code - zeros, vec);
}

// A panel's stretch -> [inputs / 2][16][2] bfloat16
template <typename Format>
void unpack_bfloat16(const uint8_t* panel, const GroupScales& scales, int64_t inputs, uint8_t* to) {
    const ivec zeros = wide_zeros(scales);
    for (int64_t i = 0; i < inputs; i += Format::INPUTS, panel += Format::ROW_STRIDE) {
        ivec raw;
        std::memcpy(&raw, panel, sizeof raw);
        for (int j = 0; j < Format::INPUTS; j += 2, to += TILE_ROW_BYTES) {
            typedef uint32_t words __attribute__((vector_size(4 * LANES)));
            const words even = (words)unpacked<Format>(raw, j, zeros), odd = (words)unpacked<Format>(raw, j + 1, zeros);
            const words both = even >> 16 | (odd & 0xffff0000u);
            std::memcpy(to, &both, sizeof both);
        }
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
    using Rows = TileRows<Element>;

    static constexpr int64_t UNPACKED = 512 / sizeof(Element);  // inputs unpacked together: at least a stretch

    ~TileKernel() { _tile_release(); }  // else every context switch would save the tiles

    // One scale for all inputs of an output: `sums` are what tiles add up, until `complete` scales them.
    void add_unscaled(const Layer& layer, const Rows& x, int64_t stretch, int64_t row, int64_t rows, int64_t pair,
                      int64_t begin, int64_t end, float* sums) {
        set_rows(rows);
        for_stretches(layer, stretch, pair, begin, end, [&](const uint8_t* const(&weights)[2], int64_t at, int64_t n) {
            multiply(weights, x, row, at, n, rows > TILE_ROWS, at == 0, sums);
        });
    }

    static void complete(const Layer& layer, const Rows& x, int64_t row, int64_t rows, int64_t pair, float* sums) {
        for (int p = 0; p < 2; p++) {
            const GroupScales scales = layer.scales(2 * pair + p, 0);
            const vec factors = load(scales.scale);
            const ivec zeros = wide_zeros(scales);
            for (int64_t r = 0; r < rows; r++) {
                float* sum = sums + r * PAIR + p * PANEL;
                const float step = BYTES ? x.step(row + r) : 1.0f;
                const vec unscaled = BYTES ? __builtin_convertvector((ivec)load(sum) - zeros * x.total(row + r), vec)
                                           : load(sum);
                store(sum, unscaled * factors * step);
            }
        }
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
