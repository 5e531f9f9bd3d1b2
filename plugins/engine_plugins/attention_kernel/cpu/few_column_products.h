// The two products for few columns: with a lane for each, most lanes would be empty.
#pragma once

#include <algorithm>
#include <cstdint>

#include "call.h"
#include "scratch.h"
#include "vector_products.h"
#include "vectors.h"

namespace {

// float32, dims in lanes. Queries [column][head_dim]; keys and values, stored as S, are read where they lie in the
// cache. Scores, probabilities and output as in VectorProducts.
template <typename T, typename S>
struct FewColumnProducts {
    static constexpr int64_t UNROLL = 4;

    static bool suits(const Call<T>& call, const Task& task, int64_t few_columns) {
        return task.num_columns <= few_columns && call.op.head_dim % LANES == 0 && call.op.out_dim % LANES == 0;
    }

    static void pack_queries(const Call<T>& call, const Task& task, Scratch& scratch, int64_t strip) {
        const Columns columns = find_columns(call, task, strip, call.q_stride, call.op.head_dim);
        for (int64_t i = 0; i < columns.count; i++)
            for (int64_t dim = 0; dim < call.op.head_dim; dim += LANES)
                store(scratch.queries + i * call.op.head_dim + dim, load_wide(call.q + columns.offset[i] + dim));
    }

    static void pack_keys(const CachedCall<T, S>& call, Scratch& scratch, int64_t count) {
        for (int64_t i = 0; i < count + PREFETCH_KEYS; i++) {
            scratch.key_rows[i] = call.keys + scratch.offsets[i];
            scratch.value_rows[i] = call.values + scratch.offsets[i];
        }
        std::fill_n(scratch.scores, CHUNK_KEYS * LANES, 0.0f);  // of lanes without a column
    }

    template <int STRIPS>
    static void multiply_keys(const Call<T>& call, const Task& task, Scratch& scratch, int64_t, int64_t begin,
                              int64_t end) {
        const void *const *keys = scratch.key_rows, *const *values = scratch.value_rows;
        for (int64_t key = begin; key < end; key++) {
            prefetch(row(keys[key + PREFETCH_KEYS]), call.op.head_dim);
            prefetch(row(values[key]), call.op.head_dim);
            for (int64_t column = 0; column < task.num_columns; column++) {
                const float* query = scratch.queries + column * call.op.head_dim;
                vec sum = {};
                for (int64_t dim = 0; dim < call.op.head_dim; dim += LANES)
                    sum += load(query + dim) * load_wide(row(keys[key]) + dim);
                scratch.scores[key * LANES + column] = sum_lanes(sum);
            }
        }
    }

    static void put_probs(Scratch& scratch, int s, int64_t key, int p, part first, part second) {
        VectorProducts<T>::put_probs(scratch, s, key, p, first, second);
    }

    template <int STRIPS>
    static void add_values(const Call<T>& call, const Task& task, Scratch& scratch, float* const* out,
                           int64_t begin, int64_t end) {
        for (int64_t column = 0; column < task.num_columns; column++) {
            int64_t dim = 0;
            for (; dim + UNROLL * LANES <= call.op.out_dim; dim += UNROLL * LANES)
                add_dims<UNROLL>(scratch, out[0], column, dim, begin, end);
            for (; dim < call.op.out_dim; dim += LANES) add_dims<1>(scratch, out[0], column, dim, begin, end);
        }
    }

   private:
    static const S* row(const void* memory) { return static_cast<const S*>(memory); }

    template <int VECTORS>
    static void add_dims(Scratch& scratch, float* out, int64_t column, int64_t dim, int64_t begin, int64_t end) {
        const void* const* values = scratch.value_rows;
        vec sum[VECTORS] = {};
        for (int64_t key = begin; key < end; key++) {
            const float prob = scratch.scores[key * LANES + column];
            for (int i = 0; i < VECTORS; i++) sum[i] += prob * load_wide(row(values[key]) + dim + i * LANES);
        }
        for (int i = 0; i < VECTORS * LANES; i++) out[(dim + i) * LANES + column] += sum[i / LANES][i % LANES];
    }
};

}  // namespace
