// What a thread works on, in memory of its own; and the two products, which know how it is laid out.
//
// A class of products has these static functions (T: float or bfloat16):
//
//   pack_queries(call, task, scratch, strip)
//       Copy the queries of a strip to scratch.queries.
//   pack_keys(call, scratch, count)
//       Copy the keys and values at the first `count` scratch.offsets, a multiple of KEY_GROUP, to scratch.keys and
//       scratch.values, and prefetch the ones PREFETCH_KEYS later.
//       The call is a CachedCall here; what is stored in 8 bits is widened, not scaled.
//   multiply_keys<STRIPS>(call, task, scratch, strip, begin, end)
//       scores[s][key][lane] = keys[key] . queries[strip + s][lane], for s in 0 .. STRIPS - 1.
//   put_probs(scratch, s, key, p, first, second)
//       Keep the probabilities of part p of the pair's strip s for `key`, which is even, and key + 1.
//   add_values<STRIPS>(call, task, scratch, out, begin, end)
//       out[s][dim][lane] += values[key][dim] * probs[s][key][lane], summed over keys.
//
// Keys are counted from the chunk's first; begin .. end do not include end and are multiples of KEY_GROUP. The classes
// for any number of columns also have
//
//   FEW_COLUMNS   up to so many columns FewColumnProducts is faster
//   Session       what a thread sets up to compute with them
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "call.h"
#include "softmax.h"
#include "split.h"

namespace {

constexpr int CHUNK_KEYS = 256;  // keys whose scores are in memory at once

// Memory of one thread. It grows to what the largest call needs and stays.
class Arena {
   public:
    ~Arena() { std::free(memory_); }

    // Uninitialised floats, from a cache line's beginning on; what was reserved before is gone. Without memory the
    // process ends: nothing can be thrown through a job.
    float* reserve(int64_t floats) {
        if (floats > size_) {
            std::free(memory_);
            const int64_t bytes = round_up(floats * sizeof(float), 64);
            memory_ = static_cast<float*>(std::aligned_alloc(64, bytes));
            if (memory_ == nullptr) {
                std::fprintf(stderr, "attention: no memory for %lld bytes of scratch\n", static_cast<long long>(bytes));
                std::abort();
            }
            size_ = floats;
        }
        return memory_;
    }

   private:
    float* memory_ = nullptr;
    int64_t size_ = 0;
};

Arena& scratch_arena() {
    static thread_local Arena arena;
    return arena;
}

Arena& splits_arena() {
    static thread_local Arena arena;
    return arena;
}

// Room is for floats. Products that compute in bfloat16 keep queries, keys, values and probs in half of theirs.
struct Scratch {
    float *states, *queries;  // of all strips of a task
    float *keys, *values;     // of a chunk
    float *scores, *probs;    // of a chunk and PAIRED_STRIPS
    float* rows;              // KEY_GROUP keys or values that were stored narrower than they are computed with

    int32_t last_keys[MAX_TASK_STRIPS * LANES];        // that each column of a task sees
    int64_t offsets[CHUNK_KEYS + PREFETCH_KEYS];       // of a chunk's keys and values in the cache, and of more
    const void* key_rows[CHUNK_KEYS + PREFETCH_KEYS];  // where those are, for FewColumnProducts
    const void* value_rows[CHUNK_KEYS + PREFETCH_KEYS];
    float key_scales[CHUNK_KEYS], value_scales[CHUNK_KEYS];  // where what is stored has scales

    // For tasks of up to `strips`.
    Scratch(Arena& arena, int64_t strips, int64_t dims) {
        const int64_t of_chunk = CHUNK_KEYS * dims, of_pair = PAIRED_STRIPS * CHUNK_KEYS * LANES;
        const std::pair<float**, int64_t> parts[] = {
            {&states, strips * StripState::floats(dims)},
            {&queries, strips * dims * LANES},
            {&keys, of_chunk},
            {&values, of_chunk},
            {&scores, of_pair},
            {&probs, of_pair},
            {&rows, KEY_GROUP * dims},
        };
        int64_t floats = 0;
        for (const auto& [part, size] : parts) floats += size;
        float* memory = arena.reserve(floats);
        for (const auto& [part, size] : parts) *part = std::exchange(memory, memory + size);
    }
};

}  // namespace
