// What a call is about: the rows of a step, the attention of a layer, where queries, keys and values lie; and a task,
// the part of it that one thread computes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "stored.h"
#include "vectors.h"

// The rows of a step; mirrored by a ctypes structure.
struct Step {
    const int32_t* q_starts;  // [num_rows + 1]
    const int32_t* kv_lens;
    const int32_t* block_tables;  // [num_rows][table_stride]
    const int32_t* key_ends;      // [num_tokens], of keys that each query sees; null: the last query is the last key
    int64_t num_rows, table_stride, block_size;

    int64_t q_len(int64_t row) const { return q_starts[row + 1] - q_starts[row]; }
};

// Attention of a layer; mirrored by a ctypes structure.
struct Op {
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t window;  // 0: none
    int64_t chunk;   // 0: none
    float scale;     // above 0
    float soft_cap;  // 0: none
    const float* sinks;  // [num_heads], one more logit each; null: none
    int64_t out_dim;     // of a head that comes out; less than head_dim where values are the first part of keys

    // First key that a query at a position sees; below 0 where its window begins before the sequence.
    int64_t first_key(int64_t position) const {
        if (chunk > 0) return position - position % chunk;
        return window > 0 ? position - window + 1 : 0;
    }
};

// Of stored keys and values; mirrored by a ctypes structure.
struct Scales {
    const float* keys;  // [num_blocks][block_size][num_kv_heads] or [num_kv_heads]; null where nothing is scaled
    const float* values;
    int32_t per_token;  // which of the two
};

namespace {

constexpr int KEY_GROUP = 32;      // keys are padded to a multiple
constexpr int DIM_GROUP = 32;      // and so are dims
constexpr int PREFETCH_KEYS = 32;  // how far to look ahead; at least KEY_GROUP
constexpr int PAIRED_STRIPS = 2;   // strips computed together: a packed key is loaded once for both

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

struct Shape {
    const Step& step;
    const Op& op;

    int64_t group() const { return op.num_heads / op.num_kv_heads; }  // heads that share a KV head
    int64_t dims() const { return round_up(op.head_dim, DIM_GROUP); }
    int64_t out_dims() const { return round_up(op.out_dim, DIM_GROUP); }

    // Last key that a column of a row sees; -1: none, which only key_ends may say.
    int32_t last_key(int64_t row, int64_t column) const {
        if (step.key_ends != nullptr) return step.key_ends[step.q_starts[row] + column / group()] - 1;
        return static_cast<int32_t>(step.kv_lens[row] - step.q_len(row) + column / group());
    }
};

template <typename T>
struct Call : Shape {
    const T* q;  // [num_tokens][num_heads][head_dim], tokens q_stride apart
    int64_t q_stride;
    T* out;  // [num_tokens][num_heads][out_dim]
    float* lse;  // [num_tokens][num_heads], the natural log-sum-exp of scores; null: not asked for
};

// A call with its cache, whose elements are T or narrower ones with scales.
template <typename T, typename S>
struct CachedCall : Call<T> {
    using Element = T;
    using Stored = S;
    static constexpr bool SCALED = !std::is_same_v<T, S>;

    const S* keys;  // [num_blocks][block_size][num_kv_heads][head_dim]
    const S* values;  // as far apart as keys; only out_dim of each are values
    const Scales& scales;
};

// Some columns of one KV head of one row, and a range of the keys they see.
struct Task {
    int64_t row = 0, first_token = 0;
    int64_t kv_head = 0;
    int64_t first_column = 0, num_columns = 0;
    int64_t first_key = 0, end_key = 0;  // up to, not including
    int64_t split = 0, num_splits = 1;   // which part of the keys; each but the last has a multiple of KEY_GROUP
    float* states = nullptr;             // where the result is left for merging; null: there is one split only

    int64_t strips() const { return divide_up(num_columns, LANES); }
    int parts() const { return num_columns <= PART_LANES ? 1 : PARTS; }  // of a strip that have columns
};

// Where the columns of a strip start: in q, or with other distances between tokens and heads in the output.
struct Columns {
    int64_t count;
    int64_t offset[LANES];
};

Columns find_columns(const Shape& shape, const Task& task, int64_t strip, int64_t token_stride, int64_t head_stride) {
    const int64_t group = shape.group(), first = task.first_column + strip * LANES;
    int64_t token = task.first_token + first / group, head = first % group;
    Columns columns{std::min<int64_t>(LANES, task.num_columns - strip * LANES), {}};
    for (int64_t i = 0; i < columns.count; i++) {
        columns.offset[i] = token * token_stride + (task.kv_head * group + head) * head_stride;
        if (++head == group) {
            head = 0;
            token++;
        }
    }
    return columns;
}

// Where `count` keys and values of a task from `first` on start in the cache; after the task's last key that one again.
void find_keys(const Shape& shape, const Task& task, int64_t first, int64_t count, int64_t* offsets) {
    const Step& step = shape.step;
    const int32_t* block = step.block_tables + task.row * step.table_stride + first / step.block_size;
    int64_t slot = first % step.block_size;
    for (int64_t i = 0; i < count; i++) {
        offsets[i] = ((*block * step.block_size + slot) * shape.op.num_kv_heads + task.kv_head) * shape.op.head_dim;
        if (first + i + 1 < task.end_key && ++slot == step.block_size) {
            slot = 0;
            block++;
        }
    }
}

// The scales of keys or values that start at the `count` offsets.
void find_scales(const Shape& shape, const Task& task, const float* scales, bool per_token, const int64_t* offsets,
                 int64_t count, float* to) {
    if (!per_token) {
        std::fill_n(to, count, scales[task.kv_head]);
        return;
    }
    for (int64_t i = 0; i < count; i++) to[i] = scales[offsets[i] / shape.op.head_dim];
}

// Blocks lie anywhere, and a head's keys apart: the processor does not foresee where the next ones are.
template <typename T>
void prefetch(const T* row, int64_t head_dim) {
    constexpr int64_t LINE = 64 / sizeof(T);
    for (int64_t dim = 0; dim < head_dim; dim += LINE) __builtin_prefetch(row + dim, 0, 2);
}

}  // namespace
