// Activations of gated layers.
#pragma once

#include "vectors.h"

enum Activation : int32_t { NONE = 0, SILU = 1, GELU_TANH = 2 };

// x / (1 + 2^y): 0 where 2^y is more than a float holds, and NaN where x is infinite, too.
inline part over_one_plus_exp2(part x, part y) {
    return x / (1.0f + exp2_part(y < 128.0f ? y : broadcast_part(128.0f)));
}

inline part silu(part x) { return over_one_plus_exp2(x, x * -LOG2_E); }

// 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
inline part gelu_tanh(part x) {
    return over_one_plus_exp2(x, x * (-1.59576912f * LOG2_E) * (1.0f + 0.044715f * x * x));
}

inline part gated(Activation activation, part gate, part up) {
    return (activation == SILU ? silu(gate) : gelu_tanh(gate)) * up;
}
