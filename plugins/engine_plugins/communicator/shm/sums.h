// Sums over ranks: ((first + second) + third) + ... in float, rounded once. The same bits on every rank.
#pragma once

#include "float16.h"

namespace {

template <typename T>
inline void round_part(T* to, part value) {
    narrow_part(to, value);
}

// Not by the processor's own instruction, which takes the smallest numbers for 0.
inline void round_part(bfloat16* to, part value) {
    typedef uint16_t half __attribute__((vector_size(2 * PART_LANES)));
    const ipart bits = (ipart)value, is_nan = value != value;
    const ipart rounded = bits + 0x7fff + ((bits >> 16) & 1), quiet = bits | 0x400000;
    const half result = __builtin_convertvector(((is_nan & quiet) | (~is_nan & rounded)) >> 16, half);
    std::memcpy(to, &result, sizeof result);
}

// `to` may be one of the parts.
template <typename T>
void add_up(const T* const* parts, int count, int64_t length, T* to) {
    int64_t i = 0;
    for (; i + PART_LANES <= length; i += PART_LANES) {
        part sum = widen_part(parts[0] + i);
        for (int rank = 1; rank < count; rank++) sum += widen_part(parts[rank] + i);
        round_part(to + i, sum);
    }
    for (; i < length; i++) {
        float sum = widen(parts[0][i]);
        for (int rank = 1; rank < count; rank++) sum += widen(parts[rank][i]);
        to[i] = narrow<T>(sum);
    }
}

}  // namespace
