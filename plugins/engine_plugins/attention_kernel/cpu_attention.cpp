// Paged attention for CPUs: FlashAttention (arXiv 2205.14135) over chunks of keys, and Flash-Decoding's splits of the
// keys where a step has fewer tasks than threads. Elements T are float or bfloat16; softmax and sums are float32.
//
// The queries of all heads that share a KV head are columns, query by query: column c of a row is query c / group,
// head c % group. Sixteen columns are a tile. Scores are computed transposed, [key][column], and so is the output,
// [dim][column]: maximum, exponential and sum of the softmax are then plain vector operations, and keys and values are
// read once for all their heads. Only how the two products are computed differs: VectorProducts on any processor,
// TileProducts on AMX for bfloat16, DotProducts where there are too few columns to fill a tile.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#include <omp.h>

#include "amx.h"
#include "element.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAS_AVX512 1
#include <immintrin.h>
#else
#define HAS_AVX512 0
#endif
// The rows of a step; mirrored by a ctypes structure.
struct Step {
    const int32_t* q_lens;
    const int32_t* kv_lens;
    const int32_t* block_tables;  // [num_rows][table_stride]
    int64_t num_rows, table_stride, block_size;
};

// Attention of a layer; mirrored by a ctypes structure.
struct Op {
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t window;  // 0: none
    float scale;     // above 0
    float soft_cap;  // 0: none
};

namespace {

constexpr int LANES = 16;          // columns of a tile
constexpr int BLOCK_TILES = 2;     // tiles whose scores are in memory at once
constexpr int KEY_GROUP = 32;      // keys are padded to a multiple
constexpr int DIM_GROUP = 32;      // and so are dims
constexpr int CHUNK_KEYS = 256;    // keys whose scores are in memory at once
constexpr int PREFETCH_KEYS = 32;  // how far to look ahead; at least KEY_GROUP
constexpr int MIN_TASK_TILES = 4, MAX_TASK_TILES = 32;
constexpr int TASKS_PER_THREAD = 4;  // so that the last ones to finish are short
constexpr int MIN_SPLIT_KEYS = 256;
// Keys times tiles times dims. A parallel region costs a few microseconds: with less to do one thread is faster.
constexpr int64_t PARALLEL_WORK = 1 << 16;

constexpr float LOG2_E = 1.44269504f;
constexpr float HIDDEN = -1e30f;  // score of a key that a query does not see; its weight is 0
constexpr float NO_MAXIMUM = -std::numeric_limits<float>::max();

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// ---- Sixteen floats, in whatever registers the processor has ----

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

inline vec load(const float* from) {
    vec result;
    std::memcpy(&result, from, sizeof result);
    return result;
}

inline void store(float* to, vec value) { std::memcpy(to, &value, sizeof value); }

inline vec load_wide(const float* from) { return load(from); }

inline vec load_wide(const bfloat16* from) {
    typedef uint16_t half __attribute__((vector_size(2 * LANES)));
    half bits;
    std::memcpy(&bits, from, sizeof bits);
    return (vec)(__builtin_convertvector(bits, ivec) << 16);
}

// Elements of a row that may end within the vector.
template <typename T>
inline void store_narrow(T* to, const float* from, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) to[i] = narrow<T>(from[i]);
}

#if HAS_AVX512 && defined(__AVX512BF16__)
inline void store_narrow(bfloat16* to, const float* from, int64_t count) {
    const __mmask16 mask = count >= LANES ? 0xffff : (1u << count) - 1;
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from)));
}
#endif

inline float sum_lanes(vec value) {
    float lanes[LANES];
    store(lanes, value);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

inline vec broadcast(float value) { return vec{} + value; }

inline vec maximum(vec a, vec b) {
#if HAS_AVX512
    return _mm512_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

// 2^x for x <= 0: 2^n times a minimax polynomial on [-1/2, 1/2]; relative error below 2e-7, about 0 below -126.
inline vec exp2_vec(vec x) {
#if HAS_AVX512
    const vec n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: adding it rounds
    x = maximum(x, broadcast(-126.0f));
    const vec n = (x + TO_INTEGER) - TO_INTEGER;
#endif
    const vec f = x - n;
    vec sum = broadcast(1.32764719e-3f);
    for (const float term : {9.67554e-3f, 5.550713e-2f, 2.402212e-1f, 6.9314697e-1f, 1.0f}) sum = sum * f + term;
#if HAS_AVX512
    return _mm512_scalef_ps(sum, n);
#else
    return (vec)((ivec)sum + (__builtin_convertvector(n, ivec) << 23));
#endif
}

inline vec tanh_vec(vec x) {
    const ivec sign = (ivec)x & std::numeric_limits<int32_t>::min();
    const vec decay = exp2_vec((-2.0f * LOG2_E) * (vec)((ivec)x ^ sign));
    return (vec)((ivec)((1.0f - decay) / (1.0f + decay)) | sign);
}

// rows: 16 rows of 16 elements of 4 bytes, `stride` apart -> to: the columns as contiguous rows.
inline void transpose(const float* rows, int64_t stride, float* to) {
#if HAS_AVX512
    __m512i a[LANES], b[LANES];
    for (int i = 0; i < LANES; i++) a[i] = _mm512_loadu_si512(rows + i * stride);
    for (int i = 0; i < LANES; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    for (int i = 0; i < LANES; i += 8)
        for (int j = 0; j < 4; j++) {
            b[i + j] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0x88);
            b[i + j + 4] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        _mm512_storeu_si512(to + j * LANES, _mm512_shuffle_i32x4(b[j], b[j + 8], 0x88));
        _mm512_storeu_si512(to + (j + 8) * LANES, _mm512_shuffle_i32x4(b[j], b[j + 8], 0xdd));
    }
#else
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) to[j * LANES + i] = rows[i * stride + j];
#endif
}

// ---- One call ----

template <typename T>
struct Call {
    const Step& step;
    const Op& op;
    const T* q;  // [num_tokens][num_heads][head_dim], tokens q_stride apart
    int64_t q_stride;
    const T* keys;  // [num_blocks][block_size][num_kv_heads][head_dim]
    const T* values;
    T* out;  // [num_tokens][num_heads][head_dim]

    int64_t group() const { return op.num_heads / op.num_kv_heads; }
    int64_t dims() const { return round_up(op.head_dim, DIM_GROUP); }
    int64_t tile_state() const { return (dims() + 2) * LANES; }
};

// Some columns of one KV head of one row, and a range of the keys they see.
struct Task {
    int64_t row, first_token;
    int64_t kv_head;
    int64_t first_column, num_columns;
    int64_t first_key, end_key;  // a multiple of KEY_GROUP keys, but for the last split
    int64_t split, num_splits;   // which part of the keys this is
    float* state;                // where the result is left for merging; null: there is one split only

    int64_t tiles() const { return divide_up(num_columns, LANES); }
};

// What has been seen of a tile: the maximum and the sum of the softmax, and the output not yet divided by the sum.
struct TileState {
    float* memory;  // [2 + dims][LANES]

    float* largest() const { return memory; }
    float* sum() const { return memory + LANES; }
    float* out() const { return memory + 2 * LANES; }

    void clear(int64_t dims) const {
        std::fill_n(memory, (dims + 2) * LANES, 0.0f);
        store(largest(), broadcast(NO_MAXIMUM));
    }

    // Carry over to a new maximum.
    void rescale(vec factor, int64_t dims) const {
        for (int64_t i = 1; i < dims + 2; i++) store(memory + i * LANES, load(memory + i * LANES) * factor);
    }

    void merge(const float* other, int64_t dims) const {
        const vec mine = load(largest()), theirs = load(other), both = maximum(mine, theirs);
        const vec my_factor = exp2_vec(mine - both), their_factor = exp2_vec(theirs - both);
        store(largest(), both);
        for (int64_t i = 1; i < dims + 2; i++) {
            float* at = memory + i * LANES;
            store(at, load(at) * my_factor + load(other + i * LANES) * their_factor);
        }
    }
};

// Where the columns of a tile start: in q, or with another distance between tokens in the output.
struct Columns {
    int64_t count;
    int64_t offset[LANES];
};

template <typename T>
Columns find_columns(const Call<T>& call, const Task& task, int64_t tile, int64_t token_stride) {
    const int64_t group = call.group(), first = task.first_column + tile * LANES;
    int64_t token = task.first_token + first / group, head = first % group;
    Columns columns{std::min<int64_t>(LANES, task.num_columns - tile * LANES), {}};
    for (int64_t i = 0; i < columns.count; i++) {
        columns.offset[i] = token * token_stride + (task.kv_head * group + head) * call.op.head_dim;
        if (++head == group) {
            head = 0;
            token++;
        }
    }
    return columns;
}

// Where `count` keys and values of a task from `first` on start in the cache; after the task's last key that one again.
template <typename T>
void find_keys(const Call<T>& call, const Task& task, int64_t first, int64_t count, int64_t* offsets) {
    const int64_t block_size = call.step.block_size;
    const int32_t* block = call.step.block_tables + task.row * call.step.table_stride + first / block_size;
    int64_t slot = first % block_size;
    for (int64_t i = 0; i < count; i++) {
        offsets[i] = ((*block * block_size + slot) * call.op.num_kv_heads + task.kv_head) * call.op.head_dim;
        if (first + i + 1 < task.end_key && ++slot == block_size) {
            slot = 0;
            block++;
        }
    }
}

// Blocks lie anywhere, and a head's keys apart: the processor does not foresee where the next ones are.
template <typename T>
void prefetch(const T* row, int64_t head_dim) {
    constexpr int64_t LINE = 64 / sizeof(T);
    for (int64_t dim = 0; dim < head_dim; dim += LINE) __builtin_prefetch(row + dim, 0, 2);
}

// Last key that a column sees.
template <typename T>
int32_t last_key(const Call<T>& call, int64_t row, int64_t column) {
    return call.step.kv_lens[row] - call.step.q_lens[row] + static_cast<int32_t>(column / call.group());
}

// Memory of one thread. It grows to what the largest call needs and stays.
class Arena {
   public:
    ~Arena() { std::free(memory_); }

    // Uninitialised floats, from a cache line's beginning on; what was reserved before is gone.
    float* reserve(int64_t floats) {
        if (floats > size_) {
            std::free(memory_);
            size_ = floats;
            memory_ = static_cast<float*>(std::aligned_alloc(64, round_up(floats * sizeof(float), 64)));
            if (memory_ == nullptr) throw std::bad_alloc();
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

// What a task works on, in its products' own layouts. Sizes are for floats; bfloat16 takes half of it.
struct Scratch {
    float *state, *queries, *keys, *values, *scores, *weights;
    int32_t* last;     // last key each column sees
    int64_t* offsets;  // of a chunk's keys, and of some more to look ahead

    static int64_t floats(int64_t tiles, int64_t dims) {
        const int64_t per_tile = (dims + 2) * LANES + dims * LANES + LANES;
        return tiles * per_tile + 2 * CHUNK_KEYS * dims + 2 * BLOCK_TILES * CHUNK_KEYS * LANES +
               2 * (CHUNK_KEYS + PREFETCH_KEYS);
    }

    Scratch(float* memory, int64_t tiles, int64_t dims) {
        const auto take = [&memory](int64_t size) { return std::exchange(memory, memory + size); };
        state = take(tiles * (dims + 2) * LANES);
        queries = take(tiles * dims * LANES);
        keys = take(CHUNK_KEYS * dims);
        values = take(CHUNK_KEYS * dims);
        scores = take(BLOCK_TILES * CHUNK_KEYS * LANES);
        weights = take(BLOCK_TILES * CHUNK_KEYS * LANES);
        last = reinterpret_cast<int32_t*>(take(tiles * LANES));
        offsets = reinterpret_cast<int64_t*>(take(2 * (CHUNK_KEYS + PREFETCH_KEYS)));
    }
};

// ---- The two products, on any processor ----

// float32 throughout. Queries [tile][dim][LANES], keys and values [key][dim]; weights are where the scores were.
template <typename T>
struct VectorProducts {
    static constexpr int64_t FEW_COLUMNS = 4;  // up to which DotProducts is faster
    static constexpr int ROWS = 8;             // independent sums: enough to hide the latency of a multiplication

    static void pack_queries(const Call<T>& call, const Task& task, const Scratch& scratch, int64_t tile) {
        float* to = scratch.queries + tile * call.dims() * LANES;
        std::fill_n(to, call.dims() * LANES, 0.0f);
        const Columns columns = find_columns(call, task, tile, call.q_stride);
        for (int64_t lane = 0; lane < columns.count; lane++) {
            const T* from = call.q + columns.offset[lane];
            for (int64_t dim = 0; dim < call.op.head_dim; dim++) to[dim * LANES + lane] = widen(from[dim]);
        }
    }

    static void pack_keys(const Call<T>& call, const Scratch& scratch, int64_t count) {
        const int64_t dims = call.dims(), head_dim = call.op.head_dim;
        for (int64_t i = 0; i < count; i++) {
            const int64_t offset = scratch.offsets[i], ahead = scratch.offsets[i + PREFETCH_KEYS];
            prefetch(call.keys + ahead, head_dim);
            prefetch(call.values + ahead, head_dim);
            widen_row(call.keys + offset, head_dim, dims, scratch.keys + i * dims);
            widen_row(call.values + offset, head_dim, dims, scratch.values + i * dims);
        }
    }

    static void widen_row(const T* from, int64_t head_dim, int64_t dims, float* to) {
#pragma omp simd
        for (int64_t dim = 0; dim < head_dim; dim++) to[dim] = widen(from[dim]);
        std::fill_n(to + head_dim, dims - head_dim, 0.0f);
    }

    // scores[tile][key][lane] of keys `begin` to `end` of the chunk
    template <int TILES>
    static void multiply_keys(const Call<T>& call, const Task&, const Scratch& scratch, int64_t tile, int64_t begin,
                              int64_t end) {
        const int64_t dims = call.dims();
        for (int t = 0; t < TILES; t++) {
            const float* queries = scratch.queries + (tile + t) * dims * LANES;
            float* scores = scratch.scores + t * CHUNK_KEYS * LANES;
            for (int64_t key = begin; key < end; key += ROWS) {
                const float* keys = scratch.keys + key * dims;
                vec sum[ROWS] = {};
                for (int64_t dim = 0; dim < dims; dim++) {
                    const vec query = load(queries + dim * LANES);
                    for (int i = 0; i < ROWS; i++) sum[i] += keys[i * dims + dim] * query;
                }
                for (int i = 0; i < ROWS; i++) store(scores + (key + i) * LANES, sum[i]);
            }
        }
    }

    static void put_weights(const Scratch& scratch, int tile, int64_t key, vec first, vec second) {
        float* to = scratch.scores + (tile * CHUNK_KEYS + key) * LANES;
        store(to, first);
        store(to + LANES, second);
    }

    // out[dim][lane] += values[key][dim] * weights[key][lane]
    template <int TILES>
    static void add_values(const Call<T>& call, const Task&, const Scratch& scratch, float* const* out, int64_t begin,
                           int64_t end) {
        const int64_t dims = call.dims();
        for (int t = 0; t < TILES; t++) {
            const float* weights = scratch.scores + t * CHUNK_KEYS * LANES;
            for (int64_t dim = 0; dim < dims; dim += ROWS) {
                float* to = out[t] + dim * LANES;
                vec sum[ROWS];
                for (int i = 0; i < ROWS; i++) sum[i] = load(to + i * LANES);
                for (int64_t key = begin; key < end; key++) {
                    const vec weight = load(weights + key * LANES);
                    const float* values = scratch.values + key * dims + dim;
                    for (int i = 0; i < ROWS; i++) sum[i] += values[i] * weight;
                }
                for (int i = 0; i < ROWS; i++) store(to + i * LANES, sum[i]);
            }
        }
    }

    struct Session {};  // nothing to set up in a thread
};

// ---- The two products for few columns ----

// float32, dims in lanes: most lanes of a tile would be empty. Keys and values are read where they lie. Queries
// [column][head_dim]; keys and values are pointers; scores, weights and the output as in VectorProducts.
template <typename T>
struct DotProducts {
    static constexpr int64_t UNROLL = 4;

    static bool suits(const Call<T>& call, const Task& task, int64_t few) {
        return task.num_columns <= few && call.op.head_dim % LANES == 0;
    }

    static void pack_queries(const Call<T>& call, const Task& task, const Scratch& scratch, int64_t tile) {
        const Columns columns = find_columns(call, task, tile, call.q_stride);
        for (int64_t i = 0; i < columns.count; i++)
            for (int64_t dim = 0; dim < call.op.head_dim; dim += LANES)
                store(scratch.queries + i * call.op.head_dim + dim, load_wide(call.q + columns.offset[i] + dim));
    }

    static void pack_keys(const Call<T>& call, const Scratch& scratch, int64_t count) {
        const T **keys = rows(scratch.keys), **values = rows(scratch.values);
        for (int64_t i = 0; i < count + PREFETCH_KEYS; i++) {
            const int64_t offset = scratch.offsets[i];
            keys[i] = call.keys + offset;
            values[i] = call.values + offset;
        }
        std::fill_n(scratch.scores, CHUNK_KEYS * LANES, 0.0f);
    }

    template <int TILES>
    static void multiply_keys(const Call<T>& call, const Task& task, const Scratch& scratch, int64_t, int64_t begin,
                              int64_t end) {
        const T *const *keys = rows(scratch.keys), *const *values = rows(scratch.values);
        for (int64_t key = begin; key < end; key++) {
            prefetch(keys[key + PREFETCH_KEYS], call.op.head_dim);
            prefetch(values[key], call.op.head_dim);
            for (int64_t column = 0; column < task.num_columns; column++) {
                const float* query = scratch.queries + column * call.op.head_dim;
                vec sum = {};
                for (int64_t dim = 0; dim < call.op.head_dim; dim += LANES)
                    sum += load(query + dim) * load_wide(keys[key] + dim);
                scratch.scores[key * LANES + column] = sum_lanes(sum);
            }
        }
    }

    static void put_weights(const Scratch& scratch, int tile, int64_t key, vec first, vec second) {
        VectorProducts<T>::put_weights(scratch, tile, key, first, second);
    }

    template <int TILES>
    static void add_values(const Call<T>& call, const Task& task, const Scratch& scratch, float* const* out,
                           int64_t begin, int64_t end) {
        for (int64_t column = 0; column < task.num_columns; column++) {
            int64_t dim = 0;
            for (; dim + UNROLL * LANES <= call.op.head_dim; dim += UNROLL * LANES)
                add_dims<UNROLL>(scratch, out[0], column, dim, begin, end);
            for (; dim < call.op.head_dim; dim += LANES) add_dims<1>(scratch, out[0], column, dim, begin, end);
        }
    }

   private:
    static const T** rows(float* memory) { return reinterpret_cast<const T**>(memory); }

    template <int VECTORS>
    static void add_dims(const Scratch& scratch, float* out, int64_t column, int64_t dim, int64_t begin, int64_t end) {
        const T* const* values = rows(scratch.values);
        vec sum[VECTORS] = {};
        for (int64_t key = begin; key < end; key++) {
            const float weight = scratch.scores[key * LANES + column];
            for (int i = 0; i < VECTORS; i++) sum[i] += weight * load_wide(values[key] + dim + i * LANES);
        }
        for (int i = 0; i < VECTORS * LANES; i++) out[(dim + i) * LANES + column] += sum[i / LANES][i % LANES];
    }
};

// ---- The two products, on AMX ----

#if HAS_AMX

constexpr int TILE_ELEMENTS = TILE_ROWS * TILE_ROW_BYTES / sizeof(bfloat16);

// Products of 16 x 32 and 32 x 16 bfloat16 tiles, summed in float32. All tiles lie contiguous:
// queries [tile][dim group], 16 pairs of dims by 16 columns of 2; keys [16 keys][dim group], 16 keys by 32 dims;
// values [key group][16 dims], 16 dims by 32 keys; weights [tile][key group], 16 pairs of keys by 16 columns of 2.
struct TileProducts {
    static constexpr int64_t FEW_COLUMNS = 2;  // up to which DotProducts is faster

    static void pack_queries(const Call<bfloat16>& call, const Task& task, const Scratch& scratch, int64_t tile) {
        const Columns columns = find_columns(call, task, tile, call.q_stride);
        bfloat16* to = tiles_of(scratch.queries) + tile * LANES * call.dims();
        for (int64_t dim = 0; dim < call.dims(); dim += DIM_GROUP, to += TILE_ELEMENTS) {
            alignas(64) float rows[LANES * LANES] = {};
            for (int64_t lane = 0; lane < columns.count; lane++)
                _mm512_store_si512(rows + lane * LANES,
                                   load_dims(call.q + columns.offset[lane] + dim, call.op.head_dim - dim));
            transpose(rows, LANES, reinterpret_cast<float*>(to));
        }
    }

    static void pack_keys(const Call<bfloat16>& call, const Scratch& scratch, int64_t count) {
        const int64_t dims = call.dims();
        for (int64_t key = 0; key < count; key += KEY_GROUP) {
            const int64_t* offsets = scratch.offsets + key;
            copy_keys(call, offsets, tiles_of(scratch.keys) + key * dims);
            turn_values(call, offsets, tiles_of(scratch.values) + key * dims);
        }
    }

    static void copy_keys(const Call<bfloat16>& call, const int64_t* offsets, bfloat16* to) {
        const int64_t dims = call.dims(), head_dim = call.op.head_dim;
        for (int64_t i = 0; i < KEY_GROUP; i++) {
            prefetch(call.keys + offsets[i + PREFETCH_KEYS], head_dim);
            bfloat16* row = to + i / LANES * LANES * dims + i % LANES * DIM_GROUP;
            for (int64_t dim = 0; dim < dims; dim += DIM_GROUP, row += TILE_ELEMENTS)
                _mm512_store_si512(row, load_dims(call.keys + offsets[i] + dim, head_dim - dim));
        }
    }

    // Two keys' values of a dim become one element of 4 bytes, then 16 such pairs by 16 dims are transposed.
    static void turn_values(const Call<bfloat16>& call, const int64_t* offsets, bfloat16* to) {
        const int64_t head_dim = call.op.head_dim;
        for (int64_t i = 0; i < KEY_GROUP; i++) prefetch(call.values + offsets[i + PREFETCH_KEYS], head_dim);
        for (int64_t dim = 0; dim < call.dims(); dim += DIM_GROUP, to += 2 * TILE_ELEMENTS) {
            alignas(64) float low[LANES * LANES], high[LANES * LANES];
            for (int64_t i = 0; i < KEY_GROUP; i += 2) {
                const __m512i first = load_dims(call.values + offsets[i] + dim, head_dim - dim);
                const __m512i second = load_dims(call.values + offsets[i + 1] + dim, head_dim - dim);
                const int64_t at = i / 2 * LANES;
                _mm512_store_si512(low + at, _mm512_permutex2var_epi16(first, in_turns(0, 32), second));
                _mm512_store_si512(high + at, _mm512_permutex2var_epi16(first, in_turns(16, 48), second));
            }
            transpose(low, LANES, reinterpret_cast<float*>(to));
            transpose(high, LANES, reinterpret_cast<float*>(to + TILE_ELEMENTS));
        }
    }

    // scores[tile][key][lane] of keys `begin` to `end` of the chunk
    template <int TILES>
    static void multiply_keys(const Call<bfloat16>& call, const Task&, const Scratch& scratch, int64_t tile,
                              int64_t begin, int64_t end) {
        const int64_t dims = call.dims();
        const bfloat16* queries = tiles_of(scratch.queries) + tile * LANES * dims;
        const bfloat16* more_queries = queries + LANES * dims;
        written(scratch.keys);
        for (int64_t key = begin; key < end; key += KEY_GROUP) {
            const bfloat16 *keys = tiles_of(scratch.keys) + key * dims, *later_keys = keys + LANES * dims;
            zero<TILES>();
            for (int64_t at = 0; at < LANES * dims; at += TILE_ELEMENTS) {
                _tile_loadd(6, queries + at, TILE_ROW_BYTES);
                if (TILES == 2) _tile_loadd(7, more_queries + at, TILE_ROW_BYTES);
                multiply<TILES>(keys + at, later_keys + at);
            }
            float* scores = scratch.scores + key * LANES;
            store_sums<TILES>(scores, scores + CHUNK_KEYS * LANES);
        }
    }

    static void put_weights(const Scratch& scratch, int tile, int64_t key, vec first, vec second) {
        const __m512i one_after_other = (__m512i)_mm512_cvtne2ps_pbh(second, first);
        const __m512i pairs = _mm512_permutexvar_epi16(in_turns(0, 16), one_after_other);
        _mm512_store_si512(tiles_of(scratch.weights) + (tile * CHUNK_KEYS + key) * LANES, pairs);
    }

    // out[dim][lane] += values[dim][key] * weights[key][lane]
    template <int TILES>
    static void add_values(const Call<bfloat16>& call, const Task&, const Scratch& scratch, float* const* out,
                           int64_t begin, int64_t end) {
        const int64_t dims = call.dims();
        written(scratch.weights);
        for (int64_t dim = 0; dim < dims; dim += DIM_GROUP) {
            float *to = out[0] + dim * LANES, *more = out[TILES - 1] + dim * LANES;
            load_sums<TILES>(to, more);
            for (int64_t key = begin; key < end; key += KEY_GROUP) {
                const bfloat16* weights = tiles_of(scratch.weights) + key * LANES;
                _tile_loadd(6, weights, TILE_ROW_BYTES);
                if (TILES == 2) _tile_loadd(7, weights + CHUNK_KEYS * LANES, TILE_ROW_BYTES);
                const bfloat16* values = tiles_of(scratch.values) + key * dims + dim * KEY_GROUP;
                multiply<TILES>(values, values + TILE_ELEMENTS);
            }
            store_sums<TILES>(to, more);
        }
    }

    // Tile registers of this thread: all eight with 16 rows of 64 bytes.
    struct Session {
        Session() {
            shape_tiles({TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS});
        }
        ~Session() { _tile_release(); }
    };

   private:
    static bfloat16* tiles_of(float* memory) { return reinterpret_cast<bfloat16*>(memory); }

    // Up to 32 dims, zeros beyond `count`.
    static __m512i load_dims(const bfloat16* from, int64_t count) {
        if (count >= DIM_GROUP) return _mm512_loadu_si512(from);
        return count <= 0 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16((1u << count) - 1, from);
    }

    // Tiles 0 and 1 are sums of the first tile of columns, 2 and 3 of the second; 4 and 5 the left operands.
    template <int TILES>
    static void zero() {
        _tile_zero(0);
        _tile_zero(1);
        if (TILES == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }

    template <int TILES>
    static void multiply(const bfloat16* left, const bfloat16* later) {
        _tile_loadd(4, left, TILE_ROW_BYTES);
        _tile_loadd(5, later, TILE_ROW_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (TILES == 2) {
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }

    template <int TILES>
    static void load_sums(const float* from, const float* more) {
        _tile_loadd(0, from, TILE_ROW_BYTES);
        _tile_loadd(1, from + LANES * LANES, TILE_ROW_BYTES);
        if (TILES == 2) {
            _tile_loadd(2, more, TILE_ROW_BYTES);
            _tile_loadd(3, more + LANES * LANES, TILE_ROW_BYTES);
        }
    }

    template <int TILES>
    static void store_sums(float* to, float* more) {
        _tile_stored(0, to, TILE_ROW_BYTES);
        _tile_stored(1, to + LANES * LANES, TILE_ROW_BYTES);
        if (TILES == 2) {
            _tile_stored(2, more, TILE_ROW_BYTES);
            _tile_stored(3, more + LANES * LANES, TILE_ROW_BYTES);
        }
    }

    // Indices first, second, first + 1, second + 1, ... of 16-bit elements; those of a second row begin at 32.
    static __m512i in_turns(int first, int second) {
        const __m512i counting = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i low = _mm512_add_epi32(counting, _mm512_set1_epi32(first));
        const __m512i high = _mm512_add_epi32(counting, _mm512_set1_epi32(second));
        return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    }
};

#endif

// ---- Softmax ----

// What is left of the scaling: a weight is 2^(score * factor - maximum). Soft-capped scores are in units of the cap.
float exponent_factor(const Op& op) { return (op.soft_cap > 0 ? op.soft_cap : op.scale) * LOG2_E; }

void apply_soft_cap(const Op& op, float* scores, int64_t begin, int64_t end) {
    const float factor = op.scale / op.soft_cap;
    for (int64_t key = begin; key < end; key++) {
        float* at = scores + key * LANES;
        store(at, tanh_vec(load(at) * factor));
    }
}

// Hide what lies after each column's last key or before its window.
void apply_mask(const Op& op, const int32_t* last, int64_t first_key, float* scores, int64_t begin, int64_t end) {
    ivec sees;
    std::memcpy(&sees, last, sizeof sees);
    const ivec before = op.window > 0 ? sees - static_cast<int32_t>(op.window) : ivec{} - 1;
    for (int64_t i = begin; i < end; i++) {
        const ivec key = ivec{} + static_cast<int32_t>(first_key + i);
        const vec score = load(scores + i * LANES);
        store(scores + i * LANES, (key > sees) | (key <= before) ? broadcast(HIDDEN) : score);
    }
}

vec largest_score(const float* scores, float factor, int64_t begin, int64_t end) {
    constexpr int CHAINS = 4;
    vec largest[CHAINS];
    for (vec& one : largest) one = broadcast(NO_MAXIMUM);
    for (int64_t key = begin; key < end; key += CHAINS)
        for (int i = 0; i < CHAINS; i++) largest[i] = maximum(largest[i], load(scores + (key + i) * LANES) * factor);
    return maximum(maximum(largest[0], largest[1]), maximum(largest[2], largest[3]));
}

bool any_differs(vec a, vec b) {
    const ivec differs = a != b;
    int32_t any = 0;
    for (int i = 0; i < LANES; i++) any |= differs[i];
    return any != 0;
}

// Scores of a tile become weights, relative to the largest score seen so far.
template <class Products>
void weigh(const Scratch& scratch, int tile, TileState state, float factor, int64_t dims, int64_t begin, int64_t end) {
    const float* scores = scratch.scores + tile * CHUNK_KEYS * LANES;
    const vec before = load(state.largest());
    const vec largest = maximum(before, largest_score(scores, factor, begin, end));
    if (any_differs(before, largest)) {
        state.rescale(exp2_vec(before - largest), dims);
        store(state.largest(), largest);
    }
    vec even = load(state.sum()), odd = {};
    for (int64_t key = begin; key < end; key += 2) {
        const vec first = exp2_vec(load(scores + key * LANES) * factor - largest);
        const vec second = exp2_vec(load(scores + (key + 1) * LANES) * factor - largest);
        even += first;
        odd += second;
        Products::put_weights(scratch, tile, key, first, second);
    }
    store(state.sum(), even + odd);
}

// ---- A task ----

// Tiles `tile` to `tile + TILES` attend to `count` packed keys, those from `first_key` on. A task's last
// key may be there several times to fill a group, at positions that no column sees.
template <class Products, int TILES, typename T>
void attend(const Call<T>& call, const Task& task, const Scratch& scratch, float* states, int64_t tile,
            int64_t first_key, int64_t count) {
    const Op& op = call.op;
    const int32_t* last = scratch.last + tile * LANES;
    // Counted from first_key: some column sees keys any_begin .. any_end, every column all_begin .. all_end.
    const int64_t all_end = last[0] + 1 - first_key, any_end = last[TILES * LANES - 1] + 1 - first_key;
    const int64_t any_begin = op.window > 0 ? all_end - op.window : 0;
    const int64_t all_begin = op.window > 0 ? any_end - op.window : 0;
    const int64_t begin = std::max<int64_t>(0, any_begin) / KEY_GROUP * KEY_GROUP;
    const int64_t end = std::min(count, round_up(any_end, KEY_GROUP));
    if (begin >= end) return;

    Products::template multiply_keys<TILES>(call, task, scratch, tile, begin, end);
    float* out[TILES];
    for (int t = 0; t < TILES; t++) {
        const TileState state{states + (tile + t) * call.tile_state()};
        float* scores = scratch.scores + t * CHUNK_KEYS * LANES;
        if (op.soft_cap > 0) apply_soft_cap(op, scores, begin, end);
        apply_mask(op, last + t * LANES, first_key, scores, begin, std::min(all_begin, end));
        apply_mask(op, last + t * LANES, first_key, scores, std::max({begin, all_begin, all_end}), end);
        weigh<Products>(scratch, t, state, exponent_factor(op), call.dims(), begin, end);
        out[t] = state.out();
    }
    Products::template add_values<TILES>(call, task, scratch, out, begin, end);
}

template <class Products, typename T>
void run_task(const Call<T>& call, const Task& task, const Scratch& scratch, float* states) {
    const int64_t tiles = task.tiles();
    for (int64_t tile = 0; tile < tiles; tile++) {
        TileState{states + tile * call.tile_state()}.clear(call.dims());
        Products::pack_queries(call, task, scratch, tile);
    }
    for (int64_t i = 0; i < tiles * LANES; i++)
        scratch.last[i] = last_key(call, task.row, task.first_column + std::min(i, task.num_columns - 1));
    for (int64_t key = task.first_key; key < task.end_key; key += CHUNK_KEYS) {
        const int64_t count = round_up(std::min<int64_t>(CHUNK_KEYS, task.end_key - key), KEY_GROUP);
        find_keys(call, task, key, count + PREFETCH_KEYS, scratch.offsets);
        Products::pack_keys(call, scratch, count);
        int64_t tile = 0;
        for (; tile + BLOCK_TILES <= tiles; tile += BLOCK_TILES)
            attend<Products, BLOCK_TILES>(call, task, scratch, states, tile, key, count);
        if (tile < tiles) attend<Products, 1>(call, task, scratch, states, tile, key, count);
    }
}

// Divide by the sums and store.
template <typename T>
void finish(const Call<T>& call, const Task& task, float* states) {
    const int64_t head_dim = call.op.head_dim;
    for (int64_t tile = 0; tile < task.tiles(); tile++) {
        const TileState state{states + tile * call.tile_state()};
        state.rescale(1.0f / load(state.sum()), call.dims());
        const Columns columns = find_columns(call, task, tile, call.op.num_heads * head_dim);
        for (int64_t dim = 0; dim < head_dim; dim += LANES) {
            alignas(64) float rows[LANES * LANES];
            transpose(state.out() + dim * LANES, LANES, rows);
            for (int64_t lane = 0; lane < columns.count; lane++)
                store_narrow(call.out + columns.offset[lane] + dim, rows + lane * LANES,
                             std::min<int64_t>(LANES, head_dim - dim));
        }
    }
}

// ---- The tasks of a call ----

struct Plan {
    std::vector<Task> tasks;
    int64_t state_floats = 0;  // of all tasks that are merged
    int64_t most_tiles = 0;
    int64_t work = 0;  // keys times tiles times dims; to read the keys counts as one tile more
};

int64_t work_of(const Task& task) { return (task.end_key - task.first_key) * (task.tiles() + 1); }

// Columns per task: as many as possible, since keys and values are packed once per task, but enough tasks for all.
template <typename T>
int64_t columns_per_task(const Call<T>& call, int64_t threads) {
    int64_t tiles = 0;
    for (int64_t row = 0; row < call.step.num_rows; row++)
        tiles += divide_up(call.step.q_lens[row] * call.group(), LANES) * call.op.num_kv_heads;
    const int64_t share = round_up(tiles / (threads * TASKS_PER_THREAD), BLOCK_TILES);
    return std::clamp<int64_t>(share, MIN_TASK_TILES, MAX_TASK_TILES) * LANES;
}

// The step's columns in parts, each with all keys it sees, for one KV head; a row's longest parts first.
template <typename T>
std::vector<Task> cut_columns(const Call<T>& call, int64_t task_columns) {
    const Step& step = call.step;
    std::vector<Task> parts;
    for (int64_t row = 0, token = 0; row < step.num_rows; token += step.q_lens[row++]) {
        const int64_t columns = step.q_lens[row] * call.group();
        for (int64_t end = columns; end > 0;) {
            const int64_t first = (end - 1) / task_columns * task_columns;
            Task task{row, token, 0, first, end - first, 0, last_key(call, row, end - 1) + 1, 0, 1, nullptr};
            if (call.op.window > 0)
                task.first_key = std::max<int64_t>(0, last_key(call, row, first) + 1 - call.op.window);
            parts.push_back(task);
            end = first;
        }
    }
    return parts;
}

// Flash-Decoding: what is more than a thread's share becomes several tasks over parts of its keys. Heads come
// innermost: their keys lie side by side in memory.
template <typename T>
Plan make_plan(const Call<T>& call, int64_t threads) {
    const int64_t heads = call.op.num_kv_heads;
    Plan plan;
    const std::vector<Task> parts = cut_columns(call, columns_per_task(call, threads));
    for (const Task& part : parts) {
        plan.work += work_of(part) * heads * call.op.head_dim;
        plan.most_tiles = std::max(plan.most_tiles, part.tiles());
    }
    const int64_t share = plan.work / (threads * TASKS_PER_THREAD * call.op.head_dim);
    for (Task task : parts) {
        const int64_t keys = task.end_key - task.first_key, end = task.end_key;
        const int64_t wanted = threads == 1 ? keys : std::max<int64_t>(share / (task.tiles() + 1), MIN_SPLIT_KEYS);
        const int64_t split_keys = round_up(divide_up(keys, divide_up(keys, wanted)), KEY_GROUP);
        task.num_splits = divide_up(keys, split_keys);
        if (task.num_splits > 1) plan.state_floats += task.num_splits * heads * task.tiles() * call.tile_state();
        for (; task.split < task.num_splits; task.split++, task.first_key = task.end_key) {
            task.end_key = std::min(end, task.first_key + split_keys);
            for (task.kv_head = 0; task.kv_head < heads; task.kv_head++) plan.tasks.push_back(task);
        }
    }
    return plan;
}

// Give every task that will be merged a place for its result.
template <typename T>
void place_states(const Call<T>& call, Plan& plan, float* memory) {
    for (Task& task : plan.tasks)
        if (task.num_splits > 1) {
            task.state = memory;
            memory += task.tiles() * call.tile_state();
        }
}

// The splits of one KV head, of which `first` is the first.
template <typename T>
void merge(const Call<T>& call, const Task* first) {
    for (int64_t split = 1; split < first->num_splits; split++) {
        const float* other = first[split * call.op.num_kv_heads].state;
        for (int64_t tile = 0; tile < first->tiles(); tile++) {
            const int64_t offset = tile * call.tile_state();
            TileState{first->state + offset}.merge(other + offset, call.dims());
        }
    }
    finish(call, *first, first->state);
}

template <class Products, typename T>
void run(const Call<T>& call) {
    const int64_t threads = omp_get_max_threads();
    Plan plan = make_plan(call, threads);
    const int64_t num_tasks = plan.tasks.size();
    place_states(call, plan, splits_arena().reserve(plan.state_floats));
#pragma omp parallel if (num_tasks > 1 && plan.work >= PARALLEL_WORK)
    {
        const int64_t tiles = plan.most_tiles, dims = call.dims();
        const Scratch scratch(scratch_arena().reserve(Scratch::floats(tiles, dims)), tiles, dims);
        [[maybe_unused]] const typename Products::Session session;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_tasks; i++) {
            const Task& task = plan.tasks[i];
            float* states = task.state != nullptr ? task.state : scratch.state;
            if (DotProducts<T>::suits(call, task, Products::FEW_COLUMNS))
                run_task<DotProducts<T>>(call, task, scratch, states);
            else
                run_task<Products>(call, task, scratch, states);
            if (task.state == nullptr) finish(call, task, states);
        }
        if (plan.state_floats > 0) {
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < num_tasks; i++)
                if (plan.tasks[i].num_splits > 1 && plan.tasks[i].split == 0) merge(call, &plan.tasks[i]);
        }
    }
}

}  // namespace

extern "C" int can_use_amx() { return request_amx(); }

extern "C" void attention_float(const Step* step, const Op* op, const float* q, int64_t q_stride, const float* keys,
                                const float* values, float* out, int) {
    run<VectorProducts<float>>(Call<float>{*step, *op, q, q_stride, keys, values, out});
}

extern "C" void attention_bfloat16(const Step* step, const Op* op, const bfloat16* q, int64_t q_stride,
                                   const bfloat16* keys, const bfloat16* values, bfloat16* out, int use_amx) {
    const Call<bfloat16> call{*step, *op, q, q_stride, keys, values, out};
#if HAS_AMX
    if (use_amx) return run<TileProducts>(call);
#endif
    run<VectorProducts<bfloat16>>(call);
}
