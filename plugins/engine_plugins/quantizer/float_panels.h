// Products of rows with float32 weights in panels, in vectors of any width: one source for every processor.
//
// A panel row of 64 bytes is one input of 16 outputs. A row's result has the same additions in the same order whatever
// the number of rows.
#pragma once

#include <cstring>

#include "panel_linear.h"
#include "vectors.h"

namespace {

// As many sums as registers hold beside weights and inputs: both panels at once for up to PAIR_ROWS rows, else one.
template <int LANES>
struct FloatPanels {
    static constexpr int REGISTERS = LANES == 16 ? 28 : 12;
    static constexpr int PAIR_ROWS = REGISTERS / (PAIR / LANES);
    static constexpr int BLOCK_ROWS = LANES == 16 ? 12 : REGISTERS / (PANEL / LANES);
    static constexpr int64_t STRETCH = 128;  // inputs for which a pair of panels stays in the first-level cache
    static constexpr int PREFETCH_BYTES = 2048;  // the hardware prefetcher stops at every page

    typedef float Vector __attribute__((vector_size(4 * LANES)));

    const float* weight;
    int64_t in_features;

    // x: the first of `rows` rows; sums: [rows][32], added to.
    template <int ROWS = BLOCK_ROWS>
    void add_rows(const float* x, int64_t x_stride, int64_t rows, int64_t pair, int64_t begin, int64_t end,
                  float* sums) const {
        if (rows < ROWS) {
            if constexpr (ROWS > 1) add_rows<ROWS - 1>(x, x_stride, rows, pair, begin, end, sums);
            return;
        }
        constexpr int PANELS = ROWS <= PAIR_ROWS ? 2 : 1;
        for (; begin < end; begin += STRETCH)
            for (int first = 0; first < 2; first += PANELS) {
                const float* panel = weight + ((2 * pair + first) * in_features + begin) * PANEL;
                add<ROWS, PANELS>(panel, x + begin, x_stride, std::min(STRETCH, end - begin), sums + first * PANEL);
            }
    }

private:
    // Else compilers load what several products share once for each of them.
    static void keep(Vector& value) {
#if defined(__x86_64__)
        if constexpr (LANES <= PART_LANES) asm("" : "+v"(value));
#endif
    }

    template <int ROWS, int PANELS>
    void add(const float* panel, const float* x, int64_t x_stride, int64_t inputs, float* to) const {
        constexpr int EACH = PANEL / LANES, VECTORS = PANELS * EACH;  // of a panel, of all
        constexpr bool HOLDS_ROWS = ROWS < VECTORS;
        constexpr int HELD = std::min(ROWS, VECTORS), PASSING = std::max(ROWS, VECTORS);
        const int64_t next_panel = in_features * PANEL;
        const auto load = [&](bool input, int index, int64_t k, Vector& to) {
            const float* from = panel + index / EACH * next_panel + index % EACH * LANES;
            if (!input && index % EACH == 0) __builtin_prefetch(reinterpret_cast<const char*>(from) + PREFETCH_BYTES);
            if (input)
                to = x[index * x_stride + k] - Vector{};
            else
                std::memcpy(&to, from, sizeof to);
            keep(to);
        };
        Vector sums[ROWS][VECTORS] = {};
        for (int64_t k = 0; k < inputs; k++, panel += PANEL) {
            // Of weights and inputs the fewer are held in registers, the others pass by, each loaded once.
            Vector held[HELD];
#pragma GCC unroll 8
            for (int h = 0; h < HELD; h++) {
                Vector one;
                load(HOLDS_ROWS, h, k, one);
                held[h] = one;
            }
#pragma GCC unroll 12
            for (int p = 0; p < PASSING; p++) {
                Vector passing;
                load(!HOLDS_ROWS, p, k, passing);
#pragma GCC unroll 8
                for (int h = 0; h < HELD; h++)
                    (HOLDS_ROWS ? sums[h][p] : sums[p][h]) += held[h] * passing;
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) {
                float* at = to + r * PAIR + v * LANES;
                Vector before;
                std::memcpy(&before, at, sizeof before);
                before += sums[r][v];
                std::memcpy(at, &before, sizeof before);
            }
        }
    }
};

}  // namespace
