// What linear layers over weights in panels of 16 outputs share: a call, its end (bias, gate, residual), and the order
// in which threads take outputs, rows and inputs. Two panels, a pair, are computed together: outputs 32 p .. 32 p + 31,
// or the gates and the ups of outputs 16 p .. 16 p + 15.
#pragma once

#include <algorithm>
#include <cstdint>


#include "activations.h"
#include "thread_pool.h"
#include "thread_scratch.h"
#include "vectors.h"

namespace {

constexpr int PANEL = 16;  // outputs of a panel
constexpr int PAIR = 2 * PANEL;

// What stays the same from call to call; mirrored in panel_linear.py. Formats that need more add it after.
struct PanelLinear {
    int64_t in_features;   // of the weight, with its padding
    int64_t out_features;  // columns of y
    const void* weight;
    const float* bias;  // by panel, padded with zeros; null: none
    Activation activation;
    int32_t instructions;  // an enum of the source
};

// Linear: PanelLinear or what is derived from it. T: elements of x and y. Strides in elements.
template <typename Linear, typename T>
struct Call {
    const Linear& linear;
    int64_t rows;
    const T* x;
    int64_t x_stride;
    T* y;
    int64_t y_stride;
    const T* residual;  // as y, perhaps y itself; null: none

    int64_t columns() const { return linear.activation == NONE ? PAIR : PANEL; }  // of y, by pair of panels
    int64_t pairs() const { return (linear.out_features + columns() - 1) / columns(); }
};

// [16] gates and [16] ups -> [16] in their place
inline void gate(Activation activation, float* sums) {
    for (int i = 0; i < PANEL; i += PART_LANES)
        store_part(sums + i, gated(activation, load_part(sums + i), load_part(sums + PANEL + i)));
}

// sums: [32] of one row and one pair of panels, changed
template <typename Linear, typename T>
void finish(const Call<Linear, T>& call, int64_t row, int64_t pair, float* sums) {
    if (call.linear.bias != nullptr) {
        const float* bias = call.linear.bias + pair * PAIR;
        for (int i = 0; i < PAIR; i += PART_LANES) store_part(sums + i, load_part(sums + i) + load_part(bias + i));
    }
    if (call.linear.activation != NONE) gate(call.linear.activation, sums);
    const int64_t columns = call.columns(), left = call.linear.out_features - pair * columns;
    const int64_t at = row * call.y_stride + pair * columns;
    const T* residual = call.residual == nullptr ? nullptr : call.residual + at;
    T* y = call.y + at;
    if (left < columns) {
        for (int64_t i = 0; i < left; i++)
            y[i] = narrow<T>(residual == nullptr ? sums[i] : sums[i] + widen(residual[i]));
    } else if (residual != nullptr) {
        for (int64_t i = 0; i < columns; i += PART_LANES)
            narrow_part(y + i, load_part(sums + i) + widen_part(residual + i));
    } else {
        for (int64_t i = 0; i < columns; i += PART_LANES) narrow_part(y + i, load_part(sums + i));
    }
}

// A kernel adds the products of some inputs to the sums [rows][32] of one pair of panels. Each thread has one:
//     typename Inputs                    what threads share: Inputs(call, rows of a group)
//     void Inputs::prepare(call, first, last)      turns the rows of a group into what is multiplied
//     Kernel(call, inputs, first)        first: row of the group
//     int64_t block(rows)                how many of the rows that are left to take next, at most BLOCK_ROWS
//     int64_t stretch()                  inputs to take at a time where there are more rows than BLOCK_ROWS
//     void add_products(row, rows, pair, begin, end, sums)       row: of the call; where `begin` is 0, sums are set
//     void complete(row, rows, pair, sums)                       after the last inputs: sums become float32

// Of a kernel whose sums are in float32, and added to.
struct FloatSums {
    static void clear(int64_t begin, int64_t rows, float* sums) {
        if (begin == 0) std::fill_n(sums, rows * PAIR, 0.0f);
    }
    static void complete(int64_t, int64_t, int64_t, float*) {}
};

// For kernels that read x as it is.
struct Unprepared {
    template <typename C>
    Unprepared(const C&, int64_t) {}
    template <typename C>
    static void prepare(const C&, int64_t, int64_t) {}
};

// Two blocks of about the same size rather than a full one and a small one.
template <int64_t BLOCK_ROWS>
int64_t block_of(int64_t rows) {
    return rows > BLOCK_ROWS && rows < 2 * BLOCK_ROWS ? (rows + 1) / 2 : std::min(rows, BLOCK_ROWS);
}

// Rows and pairs of panels whose sums fit into half of a second-level cache of 512 KB. The pairs share what is read of
// x, the rows what is read of the weights.
constexpr int64_t GROUP_ROWS = 512, GROUP_PAIRS = 4;

// sums: [pairs][rows][32]. A pair's stretch stays in the first-level cache while the rows pass by.
template <typename Kernel, typename C>
void multiply_group(const C& call, Kernel& kernel, int64_t first, int64_t last, int64_t first_pair, int64_t last_pair,
                    float* sums) {
    const int64_t inputs = call.linear.in_features;
    const int64_t stretch = last - first <= Kernel::BLOCK_ROWS ? inputs : kernel.stretch();
    for (int64_t begin = 0; begin < inputs; begin += stretch) {
        const int64_t end = std::min(inputs, begin + stretch);
        float* to = sums;
        for (int64_t pair = first_pair; pair < last_pair; pair++)
            for (int64_t row = first, rows; row < last; row += rows, to += rows * PAIR) {
                rows = kernel.block(last - row);
                kernel.add_products(row, rows, pair, begin, end, to);
                if (end < inputs) continue;
                kernel.complete(row, rows, pair, to);
                for (int64_t r = 0; r < rows; r++) finish(call, row + r, pair, to + r * PAIR);
            }
    }
}

// [GROUP_PAIRS][rows][32] of this thread. Not in a template, or a thread would have one for every kernel.
inline float* thread_sums(int64_t rows) {
    thread_local Scratch scratch;
    return static_cast<float*>(scratch.take(sizeof(float) * GROUP_PAIRS * rows * PAIR));
}

template <typename Kernel, typename C>
void multiply(const C& call) {
    typename Kernel::Inputs inputs(call, std::min(GROUP_ROWS, call.rows));
    for (int64_t first = 0; first < call.rows; first += GROUP_ROWS) {
        const int64_t last = std::min(call.rows, first + GROUP_ROWS);
        inputs.prepare(call, first, last);
        const int64_t work = (last - first) * call.linear.in_features * call.pairs() * PAIR;
        parallel(call.pairs(), GROUP_PAIRS, work, [&](Pieces& pieces) {
            float* sums = thread_sums(last - first);
            Kernel kernel(call, inputs, first);
            while (pieces.take()) multiply_group(call, kernel, first, last, pieces.first, pieces.last, sums);
        });
    }
}

}  // namespace
