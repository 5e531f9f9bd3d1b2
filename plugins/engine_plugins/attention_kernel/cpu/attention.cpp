// Attention over keys and values stored as the elements that are computed with.

#include "paged_attention.h"

extern "C" int can_use_amx() noexcept { return request_amx(); }

// Into how many parts the keys of some columns are split, at most; for tests.
extern "C" void count_splits(const Step* step, const Op* op, int64_t* most) noexcept {
    *most = 0;
    for (const Task& task : make_plan({*step, *op}, omp_get_max_threads()).tasks)
        *most = std::max(*most, task.num_splits);
}

ATTENTION(attention_float, float, float)
ATTENTION(attention_bfloat16, bfloat16, bfloat16)
