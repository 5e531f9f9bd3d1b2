// The two products on AMX: of 16 x 32 and 32 x 16 bfloat16 tiles, summed in float32. "Tile" means a register of AMX
// here, or 1 KiB of memory that fills one.
#pragma once

#include "amx.h"

#if HAS_AMX

#include <cstdint>

#include "call.h"
#include "element.h"
#include "scratch.h"
#include "stored.h"
#include "vectors.h"

namespace {

constexpr int TILE_ELEMENTS = TILE_ROWS * TILE_ROW_BYTES / sizeof(bfloat16);

// Tiles lie contiguously, each [16][32]:
//   queries  [strip][dim group]      16 pairs of dims  by  16 columns of 2
//   keys     [16 keys][dim group]    16 keys           by  32 dims
//   values   [key group][16 dims]    16 dims           by  32 keys
//   probs    [strip][key group]      16 pairs of keys  by  16 columns of 2
struct AmxProducts {
    static constexpr int64_t FEW_COLUMNS = 2;

    // All eight tiles of this thread, with 16 rows of 64 bytes.
    struct Session {
        Session() {
            shape_tiles({TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS});
        }
        ~Session() { _tile_release(); }
    };

    static void pack_queries(const Call<bfloat16>& call, const Task& task, Scratch& scratch, int64_t strip) {
        const Columns columns = find_columns(call, task, strip, call.q_stride, call.op.head_dim);
        bfloat16* to = narrow_part(scratch.queries) + strip * LANES * call.dims();
        for (int64_t dim = 0; dim < call.dims(); dim += DIM_GROUP, to += TILE_ELEMENTS) {
            alignas(64) float rows[LANES * LANES] = {};
            for (int64_t lane = 0; lane < columns.count; lane++)
                _mm512_store_si512(rows + lane * LANES,
                                   load_dims(call.q + columns.offset[lane] + dim, call.op.head_dim - dim));
            transpose(rows, LANES, reinterpret_cast<float*>(to));
        }
    }

    template <typename S>
    static void pack_keys(const CachedCall<bfloat16, S>& call, Scratch& scratch, int64_t count) {
        const int64_t dims = call.dims();
        const bfloat16* rows[KEY_GROUP];
        for (int64_t key = 0; key < count; key += KEY_GROUP) {
            const int64_t* offsets = scratch.offsets + key;
            find_rows(call, call.keys, offsets, scratch, rows);
            copy_keys(call, rows, narrow_part(scratch.keys) + key * dims);
            find_rows(call, call.values, offsets, scratch, rows);
            transpose_values(call, rows, narrow_part(scratch.values) + key * dims);
        }
    }

    template <int STRIPS>
    static void multiply_keys(const Call<bfloat16>& call, const Task&, Scratch& scratch, int64_t strip,
                              int64_t begin, int64_t end) {
        const int64_t dims = call.dims();
        const bfloat16* queries = narrow_part(scratch.queries) + strip * LANES * dims;
        const bfloat16* more_queries = queries + LANES * dims;
        written(scratch.keys);
        for (int64_t key = begin; key < end; key += KEY_GROUP) {
            const bfloat16 *keys = narrow_part(scratch.keys) + key * dims, *later_keys = keys + LANES * dims;
            zero_sums<STRIPS>();
            for (int64_t at = 0; at < LANES * dims; at += TILE_ELEMENTS) {
                _tile_loadd(6, queries + at, TILE_ROW_BYTES);
                if (STRIPS == 2) _tile_loadd(7, more_queries + at, TILE_ROW_BYTES);
                multiply<STRIPS>(keys + at, later_keys + at);
            }
            float* scores = scratch.scores + key * LANES;
            store_sums<STRIPS>(scores, scores + CHUNK_KEYS * LANES);
        }
    }

    static void put_probs(Scratch& scratch, int s, int64_t key, int, part first, part second) {
        const __m512i one_after_other = (__m512i)_mm512_cvtne2ps_pbh(second, first);
        const __m512i pairs = _mm512_permutexvar_epi16(interleave_indices(0, 16), one_after_other);
        _mm512_store_si512(narrow_part(scratch.probs) + (s * CHUNK_KEYS + key) * LANES, pairs);
    }

    template <int STRIPS>
    static void add_values(const Call<bfloat16>& call, const Task&, Scratch& scratch, float* const* out,
                           int64_t begin, int64_t end) {
        const int64_t dims = call.dims();
        written(scratch.probs);
        for (int64_t dim = 0; dim < call.out_dims(); dim += DIM_GROUP) {
            float *to = out[0] + dim * LANES, *more = out[STRIPS - 1] + dim * LANES;
            load_sums<STRIPS>(to, more);
            for (int64_t key = begin; key < end; key += KEY_GROUP) {
                const bfloat16* probs = narrow_part(scratch.probs) + key * LANES;
                _tile_loadd(6, probs, TILE_ROW_BYTES);
                if (STRIPS == 2) _tile_loadd(7, probs + CHUNK_KEYS * LANES, TILE_ROW_BYTES);
                const bfloat16* values = narrow_part(scratch.values) + key * dims + dim * KEY_GROUP;
                multiply<STRIPS>(values, values + TILE_ELEMENTS);
            }
            store_sums<STRIPS>(to, more);
        }
    }

   private:
    static bfloat16* narrow_part(float* memory) { return reinterpret_cast<bfloat16*>(memory); }

    // Up to 32 dims, zeros beyond `count`.
    static __m512i load_dims(const bfloat16* from, int64_t count) {
        if (count >= DIM_GROUP) return _mm512_loadu_si512(from);
        return count <= 0 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16((1u << count) - 1, from);
    }

    // Where the keys or values at KEY_GROUP offsets are as bfloat16: in the cache, or widened in scratch memory that
    // stays in the first cache.
    template <typename S>
    static void find_rows(const Shape& shape, const S* cache, const int64_t* offsets, Scratch& scratch,
                          const bfloat16** rows) {
        const int64_t head_dim = shape.op.head_dim, room = shape.dims();
        for (int64_t i = 0; i < KEY_GROUP; i++) {
            prefetch(cache + offsets[i + PREFETCH_KEYS], head_dim);
            if constexpr (std::is_same_v<S, bfloat16>) {
                rows[i] = cache + offsets[i];
            } else {
                bfloat16* row = narrow_part(scratch.rows) + i * room;
                widen_row(cache + offsets[i], head_dim, room, row);
                rows[i] = row;
            }
        }
        if constexpr (!std::is_same_v<S, bfloat16>) written(scratch.rows);
    }

    static void copy_keys(const Shape& shape, const bfloat16* const* rows, bfloat16* to) {
        const int64_t dims = shape.dims(), head_dim = shape.op.head_dim;
        for (int64_t i = 0; i < KEY_GROUP; i++) {
            bfloat16* row = to + i / LANES * LANES * dims + i % LANES * DIM_GROUP;
            for (int64_t dim = 0; dim < dims; dim += DIM_GROUP, row += TILE_ELEMENTS)
                _mm512_store_si512(row, load_dims(rows[i] + dim, head_dim - dim));
        }
    }

    // Two keys' values of a dim become one element of 4 bytes, then 16 such pairs by 16 dims are transposed.
    static void transpose_values(const Shape& shape, const bfloat16* const* rows, bfloat16* to) {
        const int64_t out_dim = shape.op.out_dim;
        for (int64_t dim = 0; dim < shape.out_dims(); dim += DIM_GROUP, to += 2 * TILE_ELEMENTS) {
            alignas(64) float low[LANES * LANES], high[LANES * LANES];
            for (int64_t i = 0; i < KEY_GROUP; i += 2) {
                const __m512i first = load_dims(rows[i] + dim, out_dim - dim);
                const __m512i second = load_dims(rows[i + 1] + dim, out_dim - dim);
                const int64_t at = i / 2 * LANES;
                _mm512_store_si512(low + at, _mm512_permutex2var_epi16(first, interleave_indices(0, 32), second));
                _mm512_store_si512(high + at, _mm512_permutex2var_epi16(first, interleave_indices(16, 48), second));
            }
            transpose(low, LANES, reinterpret_cast<float*>(to));
            transpose(high, LANES, reinterpret_cast<float*>(to + TILE_ELEMENTS));
        }
    }

    // Indices first, second, first + 1, second + 1, ... of 16-bit elements; those of a second vector begin at 32.
    static __m512i interleave_indices(int first, int second) {
        const __m512i counting = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i low = _mm512_add_epi32(counting, _mm512_set1_epi32(first));
        const __m512i high = _mm512_add_epi32(counting, _mm512_set1_epi32(second));
        return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    }

    // Tiles 0 and 1 are sums of the first strip, 2 and 3 of the second; 4 and 5 are left operands, shared by the
    // strips; 6 and 7 are right operands, one for each strip.
    template <int STRIPS>
    static void multiply(const bfloat16* left, const bfloat16* later) {
        _tile_loadd(4, left, TILE_ROW_BYTES);
        _tile_loadd(5, later, TILE_ROW_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (STRIPS == 2) {
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }

    template <int STRIPS>
    static void zero_sums() {
        _tile_zero(0);
        _tile_zero(1);
        if (STRIPS == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }

    template <int STRIPS>
    static void load_sums(const float* from, const float* more) {
        _tile_loadd(0, from, TILE_ROW_BYTES);
        _tile_loadd(1, from + LANES * LANES, TILE_ROW_BYTES);
        if (STRIPS == 2) {
            _tile_loadd(2, more, TILE_ROW_BYTES);
            _tile_loadd(3, more + LANES * LANES, TILE_ROW_BYTES);
        }
    }

    template <int STRIPS>
    static void store_sums(float* to, float* more) {
        _tile_stored(0, to, TILE_ROW_BYTES);
        _tile_stored(1, to + LANES * LANES, TILE_ROW_BYTES);
        if (STRIPS == 2) {
            _tile_stored(2, more, TILE_ROW_BYTES);
            _tile_stored(3, more + LANES * LANES, TILE_ROW_BYTES);
        }
    }
};

}  // namespace

#endif
