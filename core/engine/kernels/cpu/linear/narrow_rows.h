// Rows of x in bfloat16, or rounded to bytes, laid out as in float_rows.h.
#pragma once

#include <type_traits>

#include "float_rows.h"

namespace {

// Element: bfloat16, or int8_t: x ~ value * step, 255 levels a row.
template <typename Element>
class NarrowRows {
public:
    static constexpr bool BYTES = sizeof(Element) == 1;

    template <typename C>
    NarrowRows(const C&, const RowShape& shape, int64_t rows, bool = false) : shape_(shape), rows_(rows) {
        thread_local Scratch values, steps, totals, row_totals;
        const int64_t count = stretches(shape) * rows;
        values_ = static_cast<Element*>(values.take(sizeof(Element) * count * shape.stretch));
        steps_ = static_cast<float*>(steps.take(sizeof(float) * rows));
        totals_ = static_cast<int32_t*>(totals.take(sizeof(int32_t) * count));
        row_totals_ = static_cast<int32_t*>(row_totals.take(sizeof(int32_t) * rows));
    }

    template <typename C>
    void prepare(const C& call, int64_t first, int64_t last) {
        prepare_rows(shape_, first, last, [&](int64_t row, float* wide) {
            const auto* x = call.x + row * call.x_stride;
            if constexpr (std::is_same_v<decltype(x), const Element*>) {
                if (shape_.order == nullptr) return copy(x, row - first);
            }
            widen_row(shape_, x, wide);
            if (BYTES) steps_[row - first] = round(wide);
            int32_t total = 0;
            for (int64_t begin = 0; begin < shape_.padded; begin += shape_.stretch)
                total += store(wide, row - first, begin);
            row_totals_[row - first] = total;
        });
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

    void copy(const Element* x, int64_t row) {
        for (int64_t begin = 0; begin < shape_.padded; begin += shape_.stretch) {
            const int64_t end = std::min(shape_.padded, begin + shape_.stretch), there = std::min(end, shape_.inputs);
            Element* to = values_ + index(row, begin) * shape_.stretch;
            if (begin < there) std::memcpy(to, x + begin, (there - begin) * sizeof(Element));
            for (int64_t i = std::max(begin, there); i < end; i++) to[i - begin] = Element{};
        }
    }

    // Returns the sum of integers.
    int32_t store(const float* wide, int64_t row, int64_t begin) {
        const int64_t count = std::min(shape_.stretch, shape_.padded - begin);
        Element* to = values_ + index(row, begin) * shape_.stretch;
        int32_t total = 0;
        if constexpr (BYTES) {
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

}  // namespace
