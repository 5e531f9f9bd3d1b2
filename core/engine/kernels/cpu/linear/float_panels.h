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
// FROM_MEMORY: panels are streamed, so what comes next is asked for; else they are in the first-level cache.
template <int LANES, bool FROM_MEMORY>
struct FloatPanels {
    static constexpr int REGISTERS = LANES == 16 ? 28 : 12;
    static constexpr int PAIR_ROWS = REGISTERS / (PAIR / LANES);
    static constexpr int BLOCK_ROWS = LANES == 16 ? 12 : REGISTERS / (PANEL / LANES);
    static constexpr int PREFETCH_BYTES = 2048;  // the hardware prefetcher stops at every page

    typedef float Vector __attribute__((vector_size(4 * LANES)));

    // No four rows beside others: with AVX2 they are too few sums to hide the latency of additions.
    static int64_t block(int64_t rows) {
        const int64_t half = block_of<BLOCK_ROWS>(rows);
        return half < BLOCK_ROWS && half < rows && (half == 4 || rows - half == 4) ? half + 1 : half;
    }

    // panels: two of [inputs][16], `next` elements apart; x: the first of `rows` rows; sums: [rows][32], added to.
    template <int ROWS = BLOCK_ROWS>
    static void add_rows(const float* panels, int64_t next, int64_t inputs, const float* x, int64_t x_stride,
                         int64_t rows, float* sums) {
        if (rows < ROWS) {
            if constexpr (ROWS > 1) add_rows<ROWS - 1>(panels, next, inputs, x, x_stride, rows, sums);
            return;
        }
        constexpr int PANELS = ROWS <= PAIR_ROWS ? 2 : 1;
        for (int first = 0; first < 2; first += PANELS)
            add<ROWS, PANELS>(panels + first * next, next, inputs, x, x_stride, sums + first * PANEL);
    }

private:
    // Else compilers load what several products share once for each of them.
    static void keep(Vector& value) {
#if defined(__x86_64__)
        if constexpr (LANES <= PART_LANES) asm("" : "+v"(value));
#endif
    }

    template <int ROWS, int PANELS>
    static void add(const float* panel, int64_t next, int64_t inputs, const float* x, int64_t x_stride, float* to) {
        constexpr int EACH = PANEL / LANES, VECTORS = PANELS * EACH;  // of a panel, of all
        constexpr bool HOLDS_ROWS = ROWS < VECTORS;
        constexpr int HELD = std::min(ROWS, VECTORS), PASSING = std::max(ROWS, VECTORS);
        const auto load = [&](bool input, int index, int64_t k, Vector& to) {
            const float* from = panel + index / EACH * next + index % EACH * LANES;
            if (FROM_MEMORY && !input && index % EACH == 0)
                __builtin_prefetch(reinterpret_cast<const char*>(from) + PREFETCH_BYTES);
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
