// Activations of gated layers in float32, written so that compilers vectorise loops over them.
#pragma once

#include <cstdint>
#include <cstring>

enum Activation : int32_t { NONE = 0, SILU = 1, GELU_TANH = 2 };

// 2^n times a polynomial on [-ln2/2, ln2/2]: relative error below 1e-6. What is below -87 or above 87 counts as that,
// and a NaN as 87.
inline float exponential(float x) {
    constexpr uint32_t LIMIT = 0x42ae0000;  // bits of 87.0f
    uint32_t sign, magnitude;  // as integers: compilers see branches in comparisons of floats
    std::memcpy(&sign, &x, sizeof sign);
    magnitude = sign & 0x7fffffffu;
    sign ^= magnitude;
    magnitude = (magnitude < LIMIT ? magnitude : LIMIT) | sign;
    std::memcpy(&x, &magnitude, sizeof x);
    const float rounder = 12582912.0f;  // 1.5 * 2^23: a sum with it has the nearest integer in its lowest bits
    const float rounded = x * 1.44269504f + rounder;
    const float r = x - (rounded - rounder) * 0.693147181f;
    float sum = 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    uint32_t bits, exponent;
    std::memcpy(&bits, &sum, sizeof bits);
    std::memcpy(&exponent, &rounded, sizeof exponent);
    bits += exponent << 23;
    std::memcpy(&sum, &bits, sizeof sum);
    return sum;
}

inline float silu(float x) { return x / (1.0f + exponential(-x)); }

// 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
inline float gelu_tanh(float x) { return x / (1.0f + exponential(-1.59576912f * x * (1.0f + 0.044715f * x * x))); }
