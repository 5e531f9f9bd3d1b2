// Rows of x in float32, for one group of rows at a time: [stretches][rows][stretch], so that what a block of rows needs
// next lies together. Inputs beyond those of x are 0.
#pragma once

#include "panel_linear.h"

namespace {

// What to take from x, besides the layer's shape.
struct RowShape {
    int64_t inputs;        // elements of a row of x
    int64_t padded;        // the layer's in_features: at least as many
    int64_t stretch;       // inputs whose products are added before they are scaled; a multiple of 16
    const int64_t* order;  // [inputs]: where each comes from; null: in order
};

inline int64_t stretches(const RowShape& shape) { return (shape.padded + shape.stretch - 1) / shape.stretch; }

// to: [padded]
template <typename T>
void widen_row(const RowShape& shape, const T* x, float* to) {
    if (shape.order != nullptr) {
        for (int64_t i = 0; i < shape.inputs; i++) to[i] = widen(x[shape.order[i]]);
    } else {
#pragma omp simd
        for (int64_t i = 0; i < shape.inputs; i++) to[i] = widen(x[i]);
    }
    std::fill(to + shape.inputs, to + shape.padded, 0.0f);
}

// [padded] of this thread. Not in a template, or a thread would have one for every kind of rows.
inline float* thread_row(const RowShape& shape) {
    thread_local Scratch scratch;
    return static_cast<float*>(scratch.take(sizeof(float) * shape.padded));
}

// prepare(row, wide) for the rows first .. last - 1. wide: [padded], to compute in.
template <typename Prepare>
void prepare_rows(const RowShape& shape, int64_t first, int64_t last, const Prepare& prepare) {
    const int64_t rows = last - first;
    parallel(rows, rows, rows * shape.padded, [&](Pieces& pieces) {
        float* wide = thread_row(shape);
        while (pieces.take())
            for (int64_t row = first + pieces.first; row < first + pieces.last; row++) prepare(row, wide);
    });
}

// float32, as they are.
class FloatRows {
public:
    template <typename C>
    FloatRows(const C&, const RowShape& shape, int64_t rows, bool = false) : shape_(shape), rows_(rows) {
        thread_local Scratch scratch;
        values_ = static_cast<float*>(scratch.take(sizeof(float) * stretches(shape) * shape.stretch * rows));
    }

    template <typename C>
    void prepare(const C& call, int64_t first, int64_t last) {
        prepare_rows(shape_, first, last, [&](int64_t row, float* wide) {
            widen_row(shape_, call.x + row * call.x_stride, wide);
            for (int64_t begin = 0; begin < shape_.padded; begin += shape_.stretch)
                std::copy_n(wide + begin, std::min(shape_.stretch, shape_.padded - begin), at(row - first, begin));
        });
    }

    // Inputs begin .. of a row of the group; rows are `stretch` elements apart.
    float* at(int64_t row, int64_t begin) const {
        return values_ + (begin / shape_.stretch * rows_ + row) * shape_.stretch;
    }

private:
    RowShape shape_;
    int64_t rows_;
    float* values_;
};

}  // namespace
