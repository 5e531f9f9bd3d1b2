// Keys and values as the cache stores them: as the elements T that are computed with, or in 8 bits with scales.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "element.h"
#include "vectors.h"

// e4m3 without infinities (arXiv 2209.05433). Its NaN is read as 480: what is stored was clamped.
struct float8 {
    uint8_t bits;
};

inline float widen(int8_t value) { return value; }

inline float widen(float8 value) {
    const uint32_t magnitude = value.bits & 127, normal = (magnitude << 20) + (120u << 23);
    float result;
    std::memcpy(&result, &normal, sizeof result);
    if (magnitude < 8) result = static_cast<float>(magnitude) * 0x1p-9f;  // subnormal
    return value.bits & 128 ? -result : result;
}

inline vec load_wide(const int8_t* from) {
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    bytes values;
    std::memcpy(&values, from, sizeof values);
    return __builtin_convertvector(__builtin_convertvector(values, ivec), vec);
}

inline vec load_wide(const float8* from) {
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    bytes values;
    std::memcpy(&values, from, sizeof values);
    const ivec bits = __builtin_convertvector(values, ivec), magnitude = bits & 127;
    const vec normal = (vec)((magnitude << 20) + (120 << 23));
    const vec subnormal = __builtin_convertvector(magnitude, vec) * 0x1p-9f;
    return (vec)((ivec)(magnitude < 8 ? subnormal : normal) | ((bits & 128) << 24));
}

// `count` elements of a row as T, zeros from there to `room`.
template <typename T, typename S>
inline void widen_row(const S* from, int64_t count, int64_t room, T* to) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const vec values = load_wide(from + i);
        store_narrow(to + i, reinterpret_cast<const float*>(&values), LANES);
    }
    for (; i < count; i++) to[i] = narrow<T>(widen(from[i]));
    for (; i < room; i++) to[i] = narrow<T>(0.0f);
}
