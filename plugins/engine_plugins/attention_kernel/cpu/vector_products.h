// The two products on any processor.
#pragma once

#include <algorithm>
#include <cstdint>

#include "call.h"
#include "element.h"
#include "scratch.h"
#include "stored.h"
#include "vectors.h"

namespace {

// float32 throughout. Queries [strip][dim][LANES], keys and values [key][dim]; probabilities are where the scores were.
template <typename T>
struct VectorProducts {
    static constexpr int64_t FEW_COLUMNS = 4;
    static constexpr int SUMS = 8;  // independent ones: enough to hide a product's latency

    struct Session {};  // nothing

    static void pack_queries(const Call<T>& call, const Task& task, Scratch& scratch, int64_t strip) {
        float* to = scratch.queries + strip * call.dims() * LANES;
        std::fill_n(to, call.dims() * LANES, 0.0f);
        const Columns columns = find_columns(call, task, strip, call.q_stride, call.op.head_dim);
        for (int64_t lane = 0; lane < columns.count; lane++) {
            const T* from = call.q + columns.offset[lane];
            for (int64_t dim = 0; dim < call.op.head_dim; dim++) to[dim * LANES + lane] = widen(from[dim]);
        }
    }

    template <typename S>
    static void pack_keys(const CachedCall<T, S>& call, Scratch& scratch, int64_t count) {
        const int64_t dims = call.dims(), head_dim = call.op.head_dim;
        for (int64_t i = 0; i < count; i++) {
            const int64_t offset = scratch.offsets[i], ahead = scratch.offsets[i + PREFETCH_KEYS];
            prefetch(call.keys + ahead, head_dim);
            prefetch(call.values + ahead, head_dim);
            widen_row(call.keys + offset, head_dim, dims, scratch.keys + i * dims);
            widen_row(call.values + offset, call.op.out_dim, call.out_dims(), scratch.values + i * dims);
        }
    }

    template <int STRIPS>
    static void multiply_keys(const Call<T>& call, const Task& task, Scratch& scratch, int64_t strip, int64_t begin,
                              int64_t end) {
        if (task.parts() < PARTS) return multiply_parts<STRIPS, 1>(call, scratch, strip, begin, end);
        multiply_parts<STRIPS, PARTS>(call, scratch, strip, begin, end);
    }

    static void put_probs(Scratch& scratch, int s, int64_t key, int p, part first, part second) {
        float* to = scratch.scores + (s * CHUNK_KEYS + key) * LANES + p * PART_LANES;
        store_part(to, first);
        store_part(to + LANES, second);
    }

    template <int STRIPS>
    static void add_values(const Call<T>& call, const Task& task, Scratch& scratch, float* const* out, int64_t begin,
                           int64_t end) {
        if (task.parts() < PARTS) return add_parts<STRIPS, 1>(call, scratch, out, begin, end);
        add_parts<STRIPS, PARTS>(call, scratch, out, begin, end);
    }

   private:
    // Of the first USED parts of each strip.
    template <int STRIPS, int USED>
    static void multiply_parts(const Call<T>& call, Scratch& scratch, int64_t strip, int64_t begin, int64_t end) {
        constexpr int ROWS = SUMS / USED;
        const int64_t dims = call.dims();
        for (int s = 0; s < STRIPS; s++) {
            const float* queries = scratch.queries + (strip + s) * dims * LANES;
            float* scores = scratch.scores + s * CHUNK_KEYS * LANES;
            for (int64_t key = begin; key < end; key += ROWS) {
                const float* keys = scratch.keys + key * dims;
                part sum[ROWS][USED] = {};
                for (int64_t dim = 0; dim < dims; dim++) add_products(sum, keys + dim, dims, queries + dim * LANES);
                for (int i = 0; i < SUMS; i++)
                    store_part(scores + (key + i / USED) * LANES + i % USED * PART_LANES, sum[i / USED][i % USED]);
            }
        }
    }

    template <int STRIPS, int USED>
    static void add_parts(const Call<T>& call, Scratch& scratch, float* const* out, int64_t begin, int64_t end) {
        constexpr int ROWS = SUMS / USED;
        const int64_t dims = call.dims();
        for (int s = 0; s < STRIPS; s++) {
            const float* probs = scratch.scores + s * CHUNK_KEYS * LANES;
            for (int64_t dim = 0; dim < call.out_dims(); dim += ROWS) {
                float* to = out[s] + dim * LANES;
                part sum[ROWS][USED];
                for (int i = 0; i < SUMS; i++)
                    sum[i / USED][i % USED] = load_part(to + i / USED * LANES + i % USED * PART_LANES);
                for (int64_t key = begin; key < end; key++)
                    add_products(sum, scratch.values + key * dims + dim, 1, probs + key * LANES);
                for (int i = 0; i < SUMS; i++)
                    store_part(to + i / USED * LANES + i % USED * PART_LANES, sum[i / USED][i % USED]);
            }
        }
    }

    // sum[i] += from[i * stride] * lanes
    template <int ROWS, int USED>
    static void add_products(part (&sum)[ROWS][USED], const float* from, int64_t stride, const float* lanes) {
        part other[USED];
        for (int p = 0; p < USED; p++) other[p] = load_part(lanes + p * PART_LANES);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 4
            for (int p = 0; p < USED; p++) sum[i][p] += from[i * stride] * other[p];
        }
    }
};

}  // namespace
