// Compiled for each pair of types: ELEMENT (float, bfloat16), which is computed with, and STORED (the same, int8_t,
// float8) of keys and values. A plan needs one pair, and each takes its time.

#include "paged_attention.h"

extern "C" int can_use_amx() noexcept { return request_amx(); }

// Into how many parts the keys of some columns are split, at most; for tests.
extern "C" void count_splits(const Step* step, const Op* op, int64_t* most) noexcept {
    *most = 0;
    for (const Task& task : make_plan({*step, *op}, thread_pool->threads()).tasks)
        *most = std::max(*most, task.num_splits);
}

// Nothing may be thrown through ctypes: an exception (no memory for a plan) ends the process.
extern "C" void attention(const Step* step, const Op* op, const Scales* scales, const ELEMENT* q, int64_t q_stride,
                          const STORED* keys, const STORED* values, ELEMENT* out, int use_amx, float* lse) noexcept {
    attention(CachedCall<ELEMENT, STORED>{{{*step, *op}, q, q_stride, out, lse}, keys, values, *scales}, use_amx);
}
