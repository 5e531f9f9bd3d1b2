// IEEE half precision, widened to float and rounded to nearest even.
#pragma once

#include "vectors.h"

#if defined(__F16C__) && !HAS_AVX512
#include <immintrin.h>
#endif

struct float16 {
    uint16_t bits;
};

inline float widen(float16 value) {
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16, rest = value.bits & 0x7fff;
    uint32_t bits = (rest << 13) + 0x38000000;
    float result;
    if (rest >= 0x7c00) {
        bits = (rest << 13) | 0x7f800000 | (rest > 0x7c00 ? 0x400000 : 0);
    } else if (rest < 0x400) {  // subnormal: rest * 2^-24, which a float holds
        const float small = static_cast<float>(rest) * 5.9604644775390625e-8f;
        std::memcpy(&bits, &small, sizeof bits);
    }
    bits |= sign;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

template <>
inline float16 narrow<float16>(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    uint32_t result;
    if (rest > 0x7f800000) result = 0x7e00 | (rest >> 13 & 0x3ff);
    else if (rest >= 0x477ff000) result = 0x7c00;  // 65520, from which on it is infinite
    else if (rest >= 0x38800000) result = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
    else {  // below 2^-14: adding 1/2, whose last bit is 2^-24, rounds
        float small;
        std::memcpy(&small, &rest, sizeof small);
        small += 0.5f;
        std::memcpy(&result, &small, sizeof result);
        result -= 0x3f000000;
    }
    return {static_cast<uint16_t>(sign | result)};
}

inline part widen_part(const float16* from) {
#if HAS_AVX512
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__) && defined(__AVX__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    part result;
    for (int i = 0; i < PART_LANES; i++) result[i] = widen(from[i]);
    return result;
#endif
}

inline void narrow_part(float16* to, part value) {
#if HAS_AVX512
    const __m256i result = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(to, &result, sizeof result);
#elif defined(__F16C__) && defined(__AVX__)
    const __m128i result = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(to, &result, sizeof result);
#else
    for (int i = 0; i < PART_LANES; i++) to[i] = narrow<float16>(value[i]);
#endif
}
