// y = x @ W.T (+ bias) (+ residual), or act(gate) * up, in bfloat16 with float32 sums, at any number of rows.
//
// Weights lie in panels of 16 outputs: [out / 16][in / 2][16][2]. One panel row of 64 bytes holds two consecutive
// inputs of 16 outputs: what AVX512-BF16 multiplies with a broadcast pair of x, and what 16 of make an AMX tile. A
// matrix is read once from front to back, which is all that counts at few rows. Two panels are computed together:
// outputs 32 p .. 32 p + 31, or the gates and the ups of outputs 16 p .. 16 p + 15.
//
// With AMX each output is summed over its inputs in one order whatever the number of rows: a row's result does not
// depend on its neighbours.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <omp.h>

#include "activations.h"
#include "amx.h"
#include "element.h"

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#define HAS_AVX512_BF16 1
#include <immintrin.h>
#else
#define HAS_AVX512_BF16 0
#endif

enum Instructions : int32_t { PLAIN = 0, AVX512_BF16 = 1, AMX = 2 };

// What stays the same from call to call; mirrored by a ctypes structure.
struct Linear {
    int64_t in_features;   // a multiple of 32
    int64_t out_features;  // columns of y
    const bfloat16* weight;
    const float* bias;  // by panel, padded with zeros; null: none
    Activation activation;
    Instructions instructions;
};

// The best instructions this process may use.
extern "C" int32_t best_instructions() { return request_amx() ? AMX : HAS_AVX512_BF16 ? AVX512_BF16 : PLAIN; }

namespace {

constexpr int PANEL = 16;  // outputs of a panel
constexpr int PAIR = 2 * PANEL;

struct Call {
    const Linear& linear;
    int64_t rows;
    const bfloat16* x;
    int64_t x_stride;
    bfloat16* y;
    int64_t y_stride;
    const bfloat16* residual;  // as y; null: none

    int64_t columns() const { return linear.activation == NONE ? PAIR : PANEL; }  // of y, by pair of panels
    int64_t pairs() const { return (linear.out_features + columns() - 1) / columns(); }
    const bfloat16* panel(int64_t index) const { return linear.weight + index * PANEL * linear.in_features; }
};

// Sums of one row and one pair of panels -> `columns` elements of y. Columns: int64_t, or a constant of it.
template <typename Columns>
void finish_columns(const Call& call, int64_t row, int64_t pair, const float* sums, Columns columns) {
    const int64_t at = row * call.y_stride + pair * call.columns();
    bfloat16* y = call.y + at;
    if (call.linear.activation == SILU) {
#pragma omp simd
        for (int64_t i = 0; i < columns; i++) y[i] = narrow<bfloat16>(silu(sums[i]) * sums[PANEL + i]);
    } else if (call.linear.activation == GELU_TANH) {
#pragma omp simd
        for (int64_t i = 0; i < columns; i++) y[i] = narrow<bfloat16>(gelu_tanh(sums[i]) * sums[PANEL + i]);
    } else if (call.residual != nullptr) {
        const bfloat16* residual = call.residual + at;
#pragma omp simd
        for (int64_t i = 0; i < columns; i++) y[i] = narrow<bfloat16>(sums[i] + widen(residual[i]));
    } else {
#pragma omp simd
        for (int64_t i = 0; i < columns; i++) y[i] = narrow<bfloat16>(sums[i]);
    }
}

// sums: [32], changed
void finish(const Call& call, int64_t row, int64_t pair, float* sums) {
    if (call.linear.bias != nullptr) {
        const float* bias = call.linear.bias + pair * PAIR;
#pragma omp simd
        for (int i = 0; i < PAIR; i++) sums[i] += bias[i];
    }
    const int64_t left = call.linear.out_features - pair * call.columns();
    if (left < call.columns()) return finish_columns(call, row, pair, sums, left);
    // Constant counts: loops without a remainder.
    if (call.linear.activation == NONE)
        finish_columns(call, row, pair, sums, std::integral_constant<int64_t, PAIR>());
    else
        finish_columns(call, row, pair, sums, std::integral_constant<int64_t, PANEL>());
}

// A kernel adds the products of some inputs to the sums [rows][32] of one pair of panels, for up to BLOCK_ROWS rows.
// Each thread has one:
//     void add_products(const Call&, int64_t row, int64_t rows, int64_t pair, int64_t begin, int64_t end, float* sums)

// --- Any processor --------------------------------------------------------------------------------------------------

struct Plain {
    static constexpr int64_t BLOCK_ROWS = 4;

    void add_products(const Call& call, int64_t row, int64_t rows, int64_t pair, int64_t begin, int64_t end,
                      float* sums) {
        switch (rows) {
            case 1: return add<1>(call, row, pair, begin, end, sums);
            case 2: return add<2>(call, row, pair, begin, end, sums);
            case 3: return add<3>(call, row, pair, begin, end, sums);
            default: return add<BLOCK_ROWS>(call, row, pair, begin, end, sums);
        }
    }

    template <int ROWS>
    static void add(const Call& call, int64_t row, int64_t pair, int64_t begin, int64_t end, float* sums) {
        for (int p = 0; p < 2; p++, sums += PANEL) {
            const bfloat16 *panel = call.panel(2 * pair + p) + begin * PANEL, *x = call.x + row * call.x_stride;
            alignas(64) float local[ROWS][PANEL];
            for (int r = 0; r < ROWS; r++) std::copy_n(sums + r * PAIR, PANEL, local[r]);
            for (int64_t k = begin; k < end; k += 2, panel += 2 * PANEL) {
                alignas(64) float even[PANEL], odd[PANEL];
                split(panel, even, odd);
                for (int r = 0; r < ROWS; r++) {
                    const float first = widen(x[r * call.x_stride + k]), second = widen(x[r * call.x_stride + k + 1]);
#pragma omp simd
                    for (int i = 0; i < PANEL; i++) local[r][i] += even[i] * first + odd[i] * second;
                }
            }
            for (int r = 0; r < ROWS; r++) std::copy_n(local[r], PANEL, sums + r * PAIR);
        }
    }

    // A row of a panel has the weights of two consecutive inputs in turns.
    static void split(const bfloat16* panel_row, float* even, float* odd) {
        uint32_t low[PANEL], high[PANEL];
        std::memcpy(low, panel_row, sizeof low);
        for (int i = 0; i < PANEL; i++) {
            high[i] = low[i] & 0xffff0000u;
            low[i] <<= 16;
        }
        std::memcpy(even, low, sizeof low);
        std::memcpy(odd, high, sizeof high);
    }
};

// --- AVX512-BF16 ----------------------------------------------------------------------------------------------------

#if HAS_AVX512_BF16

struct Avx512 {
    static constexpr int64_t BLOCK_ROWS = 8;
    static constexpr int PREFETCH_BYTES = 2048;  // the hardware prefetcher stops at every page

    void add_products(const Call& call, int64_t row, int64_t rows, int64_t pair, int64_t begin, int64_t end,
                      float* sums) {
        switch (rows) {
            case 1: return add<1, 4>(call, row, pair, begin, end, sums);
            case 2: return add<2, 4>(call, row, pair, begin, end, sums);
            case 3: return add<3, 2>(call, row, pair, begin, end, sums);
            case 4: return add<4, 2>(call, row, pair, begin, end, sums);
            case 5: return add<5, 2>(call, row, pair, begin, end, sums);
            case 6: return add<6, 2>(call, row, pair, begin, end, sums);
            case 7: return add<7, 1>(call, row, pair, begin, end, sums);
            default: return add<BLOCK_ROWS, 1>(call, row, pair, begin, end, sums);
        }
    }

    // Every row keeps UNROLL sums per panel: enough independent chains to hide the latency.
    template <int ROWS, int UNROLL>
    static void add(const Call& call, int64_t row, int64_t pair, int64_t begin, int64_t end, float* sums) {
        const bfloat16 *panel = call.panel(2 * pair), *next_panel = call.panel(2 * pair + 1);
        const bfloat16* x = call.x + row * call.x_stride;
        // Each loop over the chains is unrolled, or the compiler would keep them in memory.
        __m512 chains[UNROLL][ROWS][2];
#pragma GCC unroll 4
        for (int u = 0; u < UNROLL; u++) {
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                chains[u][r][0] = u == 0 ? _mm512_load_ps(sums + r * PAIR) : _mm512_setzero_ps();
                chains[u][r][1] = u == 0 ? _mm512_load_ps(sums + r * PAIR + PANEL) : _mm512_setzero_ps();
            }
        }
        for (int64_t block = begin; block < end; block += 2 * UNROLL) {
#pragma GCC unroll 4
            for (int u = 0; u < UNROLL; u++) {
                const int64_t k = block + 2 * u;
                const __m512bh first = load_weights(panel + k * PANEL), second = load_weights(next_panel + k * PANEL);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    int32_t both;
                    std::memcpy(&both, x + r * call.x_stride + k, sizeof both);
                    const __m512bh inputs = (__m512bh)_mm512_set1_epi32(both);
                    chains[u][r][0] = _mm512_dpbf16_ps(chains[u][r][0], first, inputs);
                    chains[u][r][1] = _mm512_dpbf16_ps(chains[u][r][1], second, inputs);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 4
            for (int u = 1; u < UNROLL; u++) {
                chains[0][r][0] = _mm512_add_ps(chains[0][r][0], chains[u][r][0]);
                chains[0][r][1] = _mm512_add_ps(chains[0][r][1], chains[u][r][1]);
            }
            _mm512_store_ps(sums + r * PAIR, chains[0][r][0]);
            _mm512_store_ps(sums + r * PAIR + PANEL, chains[0][r][1]);
        }
    }

    static __m512bh load_weights(const bfloat16* from) {
        _mm_prefetch(reinterpret_cast<const char*>(from) + PREFETCH_BYTES, _MM_HINT_T0);
        return (__m512bh)_mm512_loadu_si512(from);
    }
};

#endif

// --- AMX ------------------------------------------------------------------------------------------------------------

#if HAS_AMX

class Amx {
public:
    static constexpr int64_t BLOCK_ROWS = 32;

    ~Amx() { _tile_release(); }  // else every context switch would save the tiles

    void add_products(const Call& call, int64_t row, int64_t rows, int64_t pair, int64_t begin, int64_t end,
                      float* sums) {
        set_rows(rows);
        written(sums);
        if (rows > TILE_ROWS)
            add<true>(call, row, pair, begin, end, sums);
        else
            add<false>(call, row, pair, begin, end, sums);
    }

private:
    static constexpr int64_t TILE_INPUTS = 32;

    int64_t rows_ = 0;

    // Tiles 0..3: sums (rows x panels, 2 x 2). 4, 5: x. 6, 7: weights.
    void set_rows(int64_t rows) {
        if (rows == rows_) return;
        rows_ = rows;
        const int upper = static_cast<int>(std::min<int64_t>(rows, TILE_ROWS));
        const int lower = std::max(1, static_cast<int>(rows) - TILE_ROWS);
        shape_tiles({upper, upper, lower, lower, upper, lower, TILE_ROWS, TILE_ROWS});
    }

    template <bool TWO_TILES>
    static void add(const Call& call, int64_t row, int64_t pair, int64_t begin, int64_t end, float* sums) {
        const bfloat16 *panel = call.panel(2 * pair), *next_panel = call.panel(2 * pair + 1);
        const bfloat16 *upper = call.x + row * call.x_stride, *lower = upper + TILE_ROWS * call.x_stride;
        const int64_t x_bytes = call.x_stride * sizeof(bfloat16);
        constexpr int SUM_BYTES = PAIR * sizeof(float);
        float* lower_sums = sums + TILE_ROWS * PAIR;
        _tile_loadd(0, sums, SUM_BYTES);
        _tile_loadd(1, sums + PANEL, SUM_BYTES);
        if (TWO_TILES) {
            _tile_loadd(2, lower_sums, SUM_BYTES);
            _tile_loadd(3, lower_sums + PANEL, SUM_BYTES);
        }
        for (int64_t k = begin; k < end; k += TILE_INPUTS) {
            _tile_loadd(4, upper + k, x_bytes);
            _tile_loadd(6, panel + k * PANEL, TILE_ROW_BYTES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, next_panel + k * PANEL, TILE_ROW_BYTES);
            _tile_dpbf16ps(1, 4, 7);
            if (TWO_TILES) {
                _tile_loadd(5, lower + k, x_bytes);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, sums, SUM_BYTES);
        _tile_stored(1, sums + PANEL, SUM_BYTES);
        if (TWO_TILES) {
            _tile_stored(2, lower_sums, SUM_BYTES);
            _tile_stored(3, lower_sums + PANEL, SUM_BYTES);
        }
    }
};

#endif

// --- All rows, all outputs ------------------------------------------------------------------------------------------

// Rows are taken in groups whose x stays in the second-level cache, inputs in stretches for which a pair of panels
// stays in the first-level cache while all rows of a group pass by.
constexpr int64_t GROUP_BYTES = 1 << 20;
constexpr int64_t GROUP_ROWS = 512;
constexpr int64_t STRETCH = 256;

// Rows first .. last of one pair of panels.
template <typename Kernel>
void multiply_group(const Call& call, Kernel& kernel, int64_t first, int64_t last, int64_t pair, float* sums) {
    const int64_t inputs = call.linear.in_features;
    const int64_t stretch = last - first <= Kernel::BLOCK_ROWS ? inputs : STRETCH;
    std::fill_n(sums, (last - first) * PAIR, 0.0f);
    for (int64_t begin = 0; begin < inputs; begin += stretch) {
        const int64_t end = std::min(inputs, begin + stretch);
        for (int64_t row = first; row < last; row += Kernel::BLOCK_ROWS) {
            const int64_t rows = std::min(Kernel::BLOCK_ROWS, last - row);
            kernel.add_products(call, row, rows, pair, begin, end, sums + (row - first) * PAIR);
        }
    }
    for (int64_t row = first; row < last; row++) finish(call, row, pair, sums + (row - first) * PAIR);
}

template <typename Kernel>
void multiply(const Call& call) {
    const int64_t cached = GROUP_BYTES / (sizeof(bfloat16) * call.linear.in_features);
    const int64_t group = std::clamp(cached, Kernel::BLOCK_ROWS, GROUP_ROWS) / Kernel::BLOCK_ROWS * Kernel::BLOCK_ROWS;
    const int64_t pairs = call.pairs();
#pragma omp parallel
    {
        alignas(64) static thread_local float sums[GROUP_ROWS * PAIR];
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        Kernel kernel;
        for (int64_t first = 0; first < call.rows; first += group) {
            const int64_t last = std::min(call.rows, first + group);
            for (int64_t pair = pairs * thread / threads; pair < pairs * (thread + 1) / threads; pair++)
                multiply_group(call, kernel, first, last, pair, sums);
        }
    }
}

}  // namespace

// x: [rows, in_features], y and residual: [rows, out_features]; strides in elements. y may be the residual itself.
extern "C" void linear(const Linear* linear, int64_t rows, const bfloat16* x, int64_t x_stride, bfloat16* y,
                       int64_t y_stride, const bfloat16* residual) {
    const Call call{*linear, rows, x, x_stride, y, y_stride, residual};
    switch (linear->instructions) {
#if HAS_AMX
        case AMX: return multiply<Amx>(call);
#endif
#if HAS_AVX512_BF16
        case AVX512_BF16: return multiply<Avx512>(call);
#endif
        default: return multiply<Plain>(call);
    }
}
