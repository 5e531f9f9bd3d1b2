// Attention over keys and values stored in 8 bits, apart: it takes seconds to compile, and few plans need it.

#include "paged_attention.h"

ATTENTION(attention_float_int8, float, int8_t)
ATTENTION(attention_float_float8, float, float8)
ATTENTION(attention_bfloat16_int8, bfloat16, int8_t)
ATTENTION(attention_bfloat16_float8, bfloat16, float8)
