// Elements as they are stored, widened to float to compute.
#pragma once

#include <cstdint>
#include <cstring>

struct bfloat16 {
    uint16_t bits;
};

inline float widen(float value) { return value; }

inline float widen(bfloat16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

template <typename T>
T narrow(float value);

template <>
inline float narrow<float>(float value) {
    return value;
}

// Round to nearest, ties to even; a NaN stays one.
template <>
inline bfloat16 narrow<bfloat16>(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
    return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
