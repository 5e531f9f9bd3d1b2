// y = x @ W.T (+ bias) (+ residual), or act(gate) * up, in bfloat16 with float32 sums, at any number of rows.
//
// Weights lie in panels of 16 outputs: [out / 16][in / 2][16][2]. One panel row of 64 bytes holds two consecutive
// inputs of 16 outputs: what AVX512-BF16 multiplies with a broadcast pair of x, and what 16 of make an AMX tile. A
// matrix is read once from front to back, which is all that counts at few rows. Two panels are computed together:
// outputs 32 p .. 32 p + 31, or the gates and the ups of outputs 16 p .. 16 p + 15.
//
// With AMX each output is summed over its inputs in one order whatever the number of rows: a row's result does not
// depend on its neighbours.

#include <cstddef>
#include <cstdint>
#include <algorithm>
#include <cmath>

#include <omp.h>

#include "element.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAS_AVX512_BF16 1
#include <immintrin.h>
#else
#define HAS_AVX512_BF16 0
#endif
#if HAS_AVX512_BF16 && defined(__AMX_BF16__) && defined(__linux__)
#define HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAS_AMX 0
#endif

// What stays the same from call to call; mirrored by a ctypes structure.
struct Linear {
    int64_t in_features;   // a multiple of 32
    int64_t out_features;  // columns of y
    const bfloat16* weight;
    const float* bias;  // by panel, padded with zeros; null: none
    int32_t activation;
    int32_t use_amx;
};

enum Activation { NONE = 0, SILU = 1, GELU_TANH = 2 };

constexpr int PANEL = 16;  // outputs of a panel
constexpr int PAIR = 2 * PANEL;

extern "C" int has_avx512_bf16() { return HAS_AVX512_BF16; }

// Linux gives the large AMX state only to processes that ask (ARCH_REQ_XCOMP_PERM of XTILEDATA), and may refuse.
extern "C" int request_amx() {
#if HAS_AMX
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return 0;
#endif
}

#if HAS_AVX512_BF16

namespace {

struct Call {
    const Linear& linear;
    int64_t rows;
    const bfloat16* x;
    int64_t x_stride;
    bfloat16* y;
    int64_t y_stride;
    const bfloat16* residual;  // as y; null: none

    int64_t pairs() const {
        const int64_t columns = linear.activation == NONE ? PAIR : PANEL;
        return (linear.out_features + columns - 1) / columns;
    }
    const bfloat16* panel(int64_t index) const { return linear.weight + index * PANEL * linear.in_features; }
};

__m512 load_bf16(const bfloat16* from, __mmask16 mask) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

void store_bf16(bfloat16* to, __mmask16 mask, __m512 values) {
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

// exp(x) for |x| < 88, relative error below 1e-6: 2^n times a polynomial on [-ln2/2, ln2/2].
__m512 exponential(__m512 x) {
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.0f)), _mm512_set1_ps(88.0f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    const __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693147181f), x);
    __m512 sum = _mm512_set1_ps(1.0f / 720);
    for (const float term : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(term));
    return _mm512_scalef_ps(sum, n);
}

__m512 logistic(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(one, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

__m512 activate(__m512 x, int32_t activation) {
    if (activation == SILU) return _mm512_mul_ps(x, logistic(x));
    // 0.5 x (1 + tanh(u)) = x * logistic(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
    const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f));
    return _mm512_mul_ps(x, logistic(_mm512_mul_ps(_mm512_mul_ps(x, cubic), _mm512_set1_ps(1.59576912f))));
}

__mmask16 columns_left(int64_t left) { return left >= PANEL ? 0xffff : left <= 0 ? 0 : (__mmask16)((1u << left) - 1); }

// Sums of one row and one pair of panels -> y.
void finish(const Call& call, int64_t row, int64_t pair, __m512 first, __m512 second) {
    if (call.linear.bias != nullptr) {
        first = _mm512_add_ps(first, _mm512_loadu_ps(call.linear.bias + pair * PAIR));
        second = _mm512_add_ps(second, _mm512_loadu_ps(call.linear.bias + pair * PAIR + PANEL));
    }
    if (call.linear.activation != NONE) {
        const __mmask16 mask = columns_left(call.linear.out_features - pair * PANEL);
        const __m512 gated = _mm512_mul_ps(activate(first, call.linear.activation), second);
        store_bf16(call.y + row * call.y_stride + pair * PANEL, mask, gated);
        return;
    }
    const int64_t at = row * call.y_stride + pair * PAIR, left = call.linear.out_features - pair * PAIR;
    const __mmask16 masks[2] = {columns_left(left), columns_left(left - PANEL)};
    if (call.residual != nullptr) {
        first = _mm512_add_ps(first, load_bf16(call.residual + at, masks[0]));
        second = _mm512_add_ps(second, load_bf16(call.residual + at + PANEL, masks[1]));
    }
    store_bf16(call.y + at, masks[0], first);
    store_bf16(call.y + at + PANEL, masks[1], second);
}

// --- AVX512-BF16 ----------------------------------------------------------------------------------------------------

constexpr int PREFETCH_BYTES = 2048;  // the hardware prefetcher stops at every page

// ROWS rows of one pair of panels. Every row keeps UNROLL sums per panel: enough chains to hide the latency.
template <int ROWS, int UNROLL>
void multiply_pair(const Call& call, int64_t row, int64_t pair) {
    const int64_t steps = call.linear.in_features / 2;
    const bfloat16* panels[2] = {call.panel(2 * pair), call.panel(2 * pair + 1)};
    const bfloat16* x = call.x + row * call.x_stride;
    __m512 sums[ROWS][2][UNROLL];
    for (auto& row_sums : sums)
        for (auto& panel_sums : row_sums)
            for (auto& sum : panel_sums) sum = _mm512_setzero_ps();
    for (int64_t step = 0; step < steps; step += UNROLL) {
#pragma GCC unroll 4
        for (int u = 0; u < UNROLL; u++) {
            __m512bh weights[2];
            for (int p = 0; p < 2; p++) {
                const bfloat16* from = panels[p] + (step + u) * 2 * PANEL;
                _mm_prefetch(reinterpret_cast<const char*>(from) + PREFETCH_BYTES, _MM_HINT_T0);
                weights[p] = (__m512bh)_mm512_loadu_si512(from);
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                int32_t both;
                std::memcpy(&both, x + r * call.x_stride + 2 * (step + u), sizeof both);
                const __m512bh inputs = (__m512bh)_mm512_set1_epi32(both);
                sums[r][0][u] = _mm512_dpbf16_ps(sums[r][0][u], weights[0], inputs);
                sums[r][1][u] = _mm512_dpbf16_ps(sums[r][1][u], weights[1], inputs);
            }
        }
    }
    for (int r = 0; r < ROWS; r++) {
        for (int u = 1; u < UNROLL; u++)
            for (int p = 0; p < 2; p++) sums[r][p][0] = _mm512_add_ps(sums[r][p][0], sums[r][p][u]);
        finish(call, row + r, pair, sums[r][0][0], sums[r][1][0]);
    }
}

constexpr int VECTOR_ROWS = 8;

void multiply_rows(const Call& call, int64_t row, int64_t rows, int64_t pair) {
    switch (rows) {
        case 1: return multiply_pair<1, 4>(call, row, pair);
        case 2: return multiply_pair<2, 4>(call, row, pair);
        case 3: return multiply_pair<3, 2>(call, row, pair);
        case 4: return multiply_pair<4, 2>(call, row, pair);
        case 5: return multiply_pair<5, 2>(call, row, pair);
        case 6: return multiply_pair<6, 2>(call, row, pair);
        case 7: return multiply_pair<7, 1>(call, row, pair);
        default: return multiply_pair<VECTOR_ROWS, 1>(call, row, pair);
    }
}

void linear_avx512(const Call& call) {
    const int64_t pairs = call.pairs();
#pragma omp parallel for schedule(static)
    for (int64_t pair = 0; pair < pairs; pair++)
        for (int64_t row = 0; row < call.rows; row += VECTOR_ROWS)
            multiply_rows(call, row, std::min<int64_t>(VECTOR_ROWS, call.rows - row), pair);
}

// --- AMX ------------------------------------------------------------------------------------------------------------

#if HAS_AMX

constexpr int TILE_ROWS = 16;
constexpr int TILE_INPUTS = 32;
constexpr int BLOCK_ROWS = 2 * TILE_ROWS;
constexpr int BLOCK_SUMS = BLOCK_ROWS * PAIR;
// Rows are taken in groups whose x stays in the second-level cache, inputs in stretches for which a pair of panels
// stays in the first-level cache while all rows of a group pass by.
constexpr int64_t GROUP_BYTES = 1 << 20;
constexpr int64_t GROUP_ROWS = 512;
constexpr int64_t STRETCH = 256;

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0..3: sums (rows x panels, 2 x 2). 4, 5: x. 6, 7: weights.
void shape_tiles(int upper, int lower) {
    const int rows[8] = {upper, upper, lower, lower, upper, lower, TILE_ROWS, TILE_ROWS};
    TileShapes shapes;
    for (int tile = 0; tile < 8; tile++) {
        shapes.rows[tile] = static_cast<uint8_t>(rows[tile]);
        shapes.row_bytes[tile] = 64;
    }
    _tile_loadconfig(&shapes);
}

// Adds the products of inputs begin .. end to the sums of up to 32 rows and one pair of panels.
template <bool TWO_TILES>
void add_products(const Call& call, int64_t row, int64_t pair, int64_t begin, int64_t end, float* sums) {
    const bfloat16 *panel = call.panel(2 * pair), *next_panel = call.panel(2 * pair + 1);
    const bfloat16 *upper = call.x + row * call.x_stride, *lower = upper + TILE_ROWS * call.x_stride;
    const int64_t x_bytes = call.x_stride * 2;
    if (begin == 0) {
        _tile_zero(0);
        _tile_zero(1);
        if (TWO_TILES) {
            _tile_zero(2);
            _tile_zero(3);
        }
    } else {
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, sums + 256, 64);
        if (TWO_TILES) {
            _tile_loadd(2, sums + 512, 64);
            _tile_loadd(3, sums + 768, 64);
        }
    }
    for (int64_t k = begin; k < end; k += TILE_INPUTS) {
        _tile_loadd(4, upper + k, x_bytes);
        _tile_loadd(6, panel + k * PANEL, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, next_panel + k * PANEL, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (TWO_TILES) {
            _tile_loadd(5, lower + k, x_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    if (TWO_TILES) {
        _tile_stored(2, sums + 512, 64);
        _tile_stored(3, sums + 768, 64);
    }
}

void finish_block(const Call& call, int64_t row, int64_t rows, int64_t pair, const float* sums) {
    for (int64_t r = 0; r < rows; r++) {
        const float* from = sums + (r / TILE_ROWS) * 512 + (r % TILE_ROWS) * PANEL;
        finish(call, row + r, pair, _mm512_load_ps(from), _mm512_load_ps(from + 256));
    }
}

struct Tiles {  // of one thread; released at the end, so that a context switch does not save them
    int upper = 0, lower = 0;
    void shape(int64_t rows) {
        const int wanted_upper = static_cast<int>(std::min<int64_t>(rows, TILE_ROWS));
        const int wanted_lower = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(rows - TILE_ROWS, TILE_ROWS)));
        if (wanted_upper == upper && wanted_lower == lower) return;
        upper = wanted_upper;
        lower = wanted_lower;
        shape_tiles(upper, lower);
    }
    ~Tiles() { _tile_release(); }
};

// Rows first .. last of one pair of panels.
void multiply_group(const Call& call, Tiles& tiles, int64_t first, int64_t last, int64_t pair, float* sums) {
    const int64_t inputs = call.linear.in_features;
    const int64_t stretch = last - first <= BLOCK_ROWS ? inputs : STRETCH;
    for (int64_t begin = 0; begin < inputs; begin += stretch) {
        const int64_t end = std::min(inputs, begin + stretch);
        float* block = sums;
        for (int64_t row = first; row < last; row += BLOCK_ROWS, block += BLOCK_SUMS) {
            const int64_t rows = std::min<int64_t>(BLOCK_ROWS, last - row);
            tiles.shape(rows);
            if (rows > TILE_ROWS)
                add_products<true>(call, row, pair, begin, end, block);
            else
                add_products<false>(call, row, pair, begin, end, block);
            if (end == inputs) finish_block(call, row, rows, pair, block);
        }
    }
}

void linear_amx(const Call& call) {
    const int64_t cached = GROUP_BYTES / (2 * call.linear.in_features) / BLOCK_ROWS * BLOCK_ROWS;
    const int64_t group = std::clamp<int64_t>(cached, BLOCK_ROWS, GROUP_ROWS);
    const int64_t pairs = call.pairs();
#pragma omp parallel
    {
        alignas(64) static thread_local float sums[GROUP_ROWS * PAIR];
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        Tiles tiles;
        for (int64_t first = 0; first < call.rows; first += group) {
            const int64_t last = std::min(call.rows, first + group);
            for (int64_t pair = pairs * thread / threads; pair < pairs * (thread + 1) / threads; pair++)
                multiply_group(call, tiles, first, last, pair, sums);
        }
    }
}

#endif

}  // namespace

// x: [rows, in_features], y and residual: [rows, out_features]; strides in elements. y may be the residual itself.
extern "C" void linear(const Linear* linear, int64_t rows, const bfloat16* x, int64_t x_stride, bfloat16* y,
                       int64_t y_stride, const bfloat16* residual) {
    const Call call{*linear, rows, x, x_stride, y, y_stride, residual};
#if HAS_AMX
    if (linear->use_amx) return linear_amx(call);
#endif
    linear_avx512(call);
}

#endif
