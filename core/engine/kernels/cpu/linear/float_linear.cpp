// y = x @ W.T (+ bias) (+ residual), or act(gate) * up, in float32, or in bfloat16 with float32 sums, at any number of
// rows.
//
// Weights lie in panels of 16 outputs. A matrix is read once from front to back, which is all that counts at few rows.
// bfloat16: [out / 16][in / 2][16][2]. One panel row of 64 bytes holds two consecutive inputs of 16 outputs: what
// AVX512-BF16 multiplies with a broadcast pair of x, what 16 of make an AMX tile, and what other processors widen to
// float32. float32: [out / 16][in][16], one input a row.
//
// Each output is summed over its inputs in one order whatever the number of rows, but for AVX512-BF16: a row's result
// does not depend on its neighbours.
//
// Compiled with ELEMENT=float and with ELEMENT=bfloat16: a plan needs one of the two, and each takes its time.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "amx.h"
#include "float_panels.h"
#include "float_rows.h"
#include "narrow_rows.h"
#include "panel_linear.h"

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#define HAS_AVX512_BF16 1
#include <immintrin.h>
#else
#define HAS_AVX512_BF16 0
#endif

#if defined(__AVX2__) && defined(__FMA__)
#define HAS_AVX2 1
#else
#define HAS_AVX2 0
#endif

#if defined(__AVX512F__)
#define HAS_AVX512F 1
#else
#define HAS_AVX512F 0
#endif

enum Instructions : int32_t { PLAIN = 0, AVX2 = 1, AVX512 = 2, AVX512_BF16 = 3, AMX = 4 };

using Linear = PanelLinear;  // in_features: in bfloat16 a multiple of 32

constexpr bool IS_FLOAT = std::is_same_v<ELEMENT, float>;

// What this process may use, a bit each. In float32 the widest vectors are best, in bfloat16 that is measured.
extern "C" int32_t instructions() {
    const int32_t vectors = 1 << PLAIN | HAS_AVX2 << AVX2 | HAS_AVX512F << AVX512;
    return IS_FLOAT ? vectors : vectors | HAS_AVX512_BF16 << AVX512_BF16 | request_amx() << AMX;
}

namespace {

using Bf16Call = Call<Linear, bfloat16>;

// --- float32 --------------------------------------------------------------------------------------------------------

template <int LANES>
struct Floats : FloatSums {
    using Inputs = Unprepared;
    using Panels = FloatPanels<LANES, true>;
    static constexpr int64_t BLOCK_ROWS = Panels::BLOCK_ROWS;
    static constexpr int64_t STRETCH = 128;  // inputs for which a pair of panels stays in the first-level cache

    const Call<Linear, float>& call;

    Floats(const Call<Linear, float>& call, const Unprepared&, int64_t) : call(call) {}
    static int64_t stretch() { return STRETCH; }
    static int64_t block(int64_t rows) { return Panels::block(rows); }

    void add_products(int64_t row, int64_t rows, int64_t pair, int64_t begin, int64_t end, float* sums) const {
        const int64_t panel_size = call.linear.in_features * PANEL;
        const float* panels = static_cast<const float*>(call.linear.weight) + 2 * pair * panel_size;
        const float* x = call.x + row * call.x_stride;
        clear(begin, rows, sums);
        for (; begin < end; begin += STRETCH)
            Panels::add_rows(panels + begin * PANEL, panel_size, std::min(STRETCH, end - begin), x + begin,
                             call.x_stride, rows, sums);
    }
};

// --- bfloat16, widened ----------------------------------------------------------------------------------------------

// Weights become float32 a stretch at a time: once for all rows of a group, in the first-level cache.
template <int LANES>
class Widened : public FloatSums {
public:
    using Panels = FloatPanels<LANES, false>;
    static constexpr int64_t BLOCK_ROWS = Panels::BLOCK_ROWS;
    static constexpr int64_t STRETCH = 128;  // inputs of a pair of panels that fill half of a first-level cache

    struct Inputs : FloatRows {
        Inputs(const Bf16Call& call, int64_t rows)
            : FloatRows(call, {call.linear.in_features, call.linear.in_features, STRETCH, nullptr}, rows) {}
    };

    Widened(const Bf16Call& call, const Inputs& x, int64_t first) : call_(call), x_(x), first_(first) {}

    static int64_t stretch() { return STRETCH; }
    static int64_t block(int64_t rows) { return Panels::block(rows); }

    void add_products(int64_t row, int64_t rows, int64_t pair, int64_t begin, int64_t end, float* sums) {
        clear(begin, rows, sums);
        for (; begin < end; begin += STRETCH) {
            const int64_t inputs = std::min(STRETCH, end - begin);
            const float* x = x_.at(row - first_, begin);
            if (rows <= FEW_ROWS) {
                add_few(pair, begin, inputs, x, rows, sums);
                continue;
            }
            if (pair != pair_ || begin != begin_) widen_panels(pair, begin, inputs);
            Panels::add_rows(wide_[0], STRETCH * PANEL, inputs, x, STRETCH, rows, sums);
        }
    }

private:
    static constexpr int64_t PREFETCH = 2048 / sizeof(bfloat16);  // the hardware prefetcher stops at every page
    // Rows for which it is faster to widen weights in registers: all sums are there, too.
    static constexpr int FEW_ROWS = LANES == 16 ? 8 : LANES / 4;
    static constexpr int VECTORS = PAIR / LANES;

    typedef float Vector __attribute__((vector_size(4 * LANES)));
    typedef int32_t Words __attribute__((vector_size(4 * LANES)));

    const bfloat16* panel(int64_t index, int64_t begin) const {
        const auto* weight = static_cast<const bfloat16*>(call_.linear.weight);
        return weight + (index * call_.linear.in_features + begin) * PANEL;
    }

    // A row of a panel has the weights of two consecutive inputs in turns. from: LANES outputs of it.
    static void load(const bfloat16* from, Vector& even, Vector& odd) {
        Words both;
        std::memcpy(&both, from, sizeof both);
        even = (Vector)(both << 16);
        odd = (Vector)(both & static_cast<int32_t>(0xffff0000));
    }

    void widen_panels(int64_t pair, int64_t begin, int64_t inputs) {
        pair_ = pair, begin_ = begin;
        for (int p = 0; p < 2; p++) {
            const bfloat16* from = panel(2 * pair + p, begin);
            for (float* to = wide_[p]; to < wide_[p] + inputs * PANEL; to += 2 * PANEL, from += 2 * PANEL) {
                __builtin_prefetch(from + PREFETCH);
                for (int i = 0; i < PANEL; i += LANES) {
                    Vector even, odd;
                    load(from + 2 * i, even, odd);
                    std::memcpy(to + i, &even, sizeof even);
                    std::memcpy(to + PANEL + i, &odd, sizeof odd);
                }
            }
        }
    }

    template <int ROWS = FEW_ROWS>
    void add_few(int64_t pair, int64_t begin, int64_t inputs, const float* x, int64_t rows, float* sums) const {
        if (rows < ROWS) {
            if constexpr (ROWS > 1) add_few<ROWS - 1>(pair, begin, inputs, x, rows, sums);
            return;
        }
        const bfloat16* panels[2] = {panel(2 * pair, begin), panel(2 * pair + 1, begin)};
        Vector added[ROWS][VECTORS] = {};
        for (int64_t k = 0; k < inputs; k += 2) {
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) {
                const bfloat16* from = panels[v * LANES / PANEL] + k * PANEL + 2 * (v * LANES % PANEL);
                if (v * LANES % PANEL == 0) __builtin_prefetch(from + PREFETCH);
                Vector even, odd;
                load(from, even, odd);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    added[r][v] += even * (x[r * STRETCH + k] - Vector{});
                    added[r][v] += odd * (x[r * STRETCH + k + 1] - Vector{});
                }
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) {
                Vector before;
                std::memcpy(&before, sums + r * PAIR + v * LANES, sizeof before);
                before += added[r][v];
                std::memcpy(sums + r * PAIR + v * LANES, &before, sizeof before);
            }
    }

    const Bf16Call& call_;
    const Inputs& x_;
    const int64_t first_;
    int64_t pair_ = -1, begin_ = -1;
    alignas(64) float wide_[2][STRETCH * PANEL];
};

// --- bfloat16, as it is, with AVX512-BF16 and with AMX ---------------------------------------------------------------

constexpr int64_t STRETCH = 256;  // inputs for which a pair of panels stays in the first-level cache

#if HAS_AVX512_BF16

struct Avx512Bf16 : FloatSums {
    using Inputs = Unprepared;
    static constexpr int64_t BLOCK_ROWS = 8;
    static constexpr int PREFETCH_BYTES = 2048;  // the hardware prefetcher stops at every page

    const Bf16Call& call;

    Avx512Bf16(const Bf16Call& call, const Unprepared&, int64_t) : call(call) {}
    static int64_t stretch() { return STRETCH; }
    static int64_t block(int64_t rows) { return std::min(rows, BLOCK_ROWS); }

    void add_products(int64_t row, int64_t rows, int64_t pair, int64_t begin, int64_t end, float* sums) {
        clear(begin, rows, sums);
        switch (rows) {
            case 1: return add<1, 4>(row, pair, begin, end, sums);
            case 2: return add<2, 4>(row, pair, begin, end, sums);
            case 3: return add<3, 2>(row, pair, begin, end, sums);
            case 4: return add<4, 2>(row, pair, begin, end, sums);
            case 5: return add<5, 2>(row, pair, begin, end, sums);
            case 6: return add<6, 2>(row, pair, begin, end, sums);
            case 7: return add<7, 1>(row, pair, begin, end, sums);
            default: return add<BLOCK_ROWS, 1>(row, pair, begin, end, sums);
        }
    }

    // Every row keeps UNROLL sums per panel: enough independent chains to hide the latency.
    template <int ROWS, int UNROLL>
    void add(int64_t row, int64_t pair, int64_t begin, int64_t end, float* sums) const {
        const int64_t panel_size = PANEL * call.linear.in_features;
        const auto* first_panel = static_cast<const bfloat16*>(call.linear.weight) + 2 * pair * panel_size;
        const bfloat16 *next_panel = first_panel + panel_size, *x = call.x + row * call.x_stride;
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
                const __m512bh first = load_weights(first_panel + k * PANEL);
                const __m512bh second = load_weights(next_panel + k * PANEL);
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

#if HAS_AMX

class Amx {
public:
    static constexpr int64_t BLOCK_ROWS = 32;

    // Where rows of x are whole pages apart, a tile's rows would share one set of the first-level cache: then they are
    // copied to where they are near. With 4,096 inputs that multiplies 512 rows 1.4 times as fast.
    struct Inputs : NarrowRows<bfloat16> {
        const bool is_direct;

        Inputs(const Bf16Call& call, int64_t rows)
            : NarrowRows(call, {call.linear.in_features, call.linear.in_features, STRETCH, nullptr}, rows),
              is_direct(call.rows <= DIRECT_ROWS || call.x_stride % PAGE != 0) {}

        void prepare(const Bf16Call& call, int64_t first, int64_t last) {
            if (!is_direct) NarrowRows::prepare(call, first, last);
        }
    };

    Amx(const Bf16Call& call, const Inputs& x, int64_t first)
        : call_(call), x_(x), is_direct_(x.is_direct), first_(first) {}
    ~Amx() { _tile_release(); }  // else every context switch would save the tiles

    static int64_t stretch() { return STRETCH; }
    static int64_t block(int64_t rows) { return std::min(rows, BLOCK_ROWS); }

    void add_products(int64_t row, int64_t rows, int64_t pair, int64_t begin, int64_t end, float* sums) {
        set_rows(rows);
        for (int64_t at = begin, stop; at < end; at = stop) {
            stop = is_direct_ ? end : std::min(end, at + STRETCH);
            const bfloat16* x = is_direct_ ? call_.x + row * call_.x_stride + at : x_.at(row - first_, at);
            const int64_t x_stride = is_direct_ ? call_.x_stride : STRETCH;
            if (at > 0) written(sums);
            const bool streams = row == first_;  // later rows find the weights in the caches
            if (rows > TILE_ROWS)
                add<true>(x, x_stride, pair, at, stop, streams, sums);
            else
                add<false>(x, x_stride, pair, at, stop, streams, sums);
        }
    }

    static void complete(int64_t, int64_t, int64_t, float*) {}

private:
    static constexpr int64_t TILE_INPUTS = 32, DIRECT_ROWS = 8, PAGE = 4096 / sizeof(bfloat16);
    static constexpr int PREFETCH_BYTES = 512;  // loads of tiles do not wake the hardware prefetcher in time

    const Bf16Call& call_;
    const Inputs& x_;
    const bool is_direct_;
    const int64_t first_;
    int64_t rows_ = 0;

    const bfloat16* panel(int64_t index, int64_t begin) const {
        const auto* weight = static_cast<const bfloat16*>(call_.linear.weight);
        return weight + (index * call_.linear.in_features + begin) * PANEL;
    }

    static void prefetch_tile(const bfloat16* weights) {
        const char* from = reinterpret_cast<const char*>(weights) + PREFETCH_BYTES;
        for (int row = 0; row < TILE_ROWS; row++) _mm_prefetch(from + row * TILE_ROW_BYTES, _MM_HINT_T0);
    }

    // Tiles 0..3: sums (rows x panels, 2 x 2). 4, 5: x. 6, 7: weights.
    void set_rows(int64_t rows) {
        if (rows == rows_) return;
        rows_ = rows;
        const int upper = static_cast<int>(std::min<int64_t>(rows, TILE_ROWS));
        const int lower = std::max(1, static_cast<int>(rows) - TILE_ROWS);
        shape_tiles({upper, upper, lower, lower, upper, lower, TILE_ROWS, TILE_ROWS});
    }

    template <bool TWO_TILES>
    void add(const bfloat16* upper, int64_t x_stride, int64_t pair, int64_t begin, int64_t end, bool streams,
             float* sums) const {
        const bfloat16 *first_panel = panel(2 * pair, begin), *next_panel = panel(2 * pair + 1, begin);
        const bfloat16* lower = upper + TILE_ROWS * x_stride;
        const int64_t x_bytes = x_stride * sizeof(bfloat16);
        constexpr int SUM_BYTES = PAIR * sizeof(float);
        float* lower_sums = sums + TILE_ROWS * PAIR;
        if (begin == 0) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        } else {
            _tile_loadd(0, sums, SUM_BYTES);
            _tile_loadd(1, sums + PANEL, SUM_BYTES);
            if (TWO_TILES) {
                _tile_loadd(2, lower_sums, SUM_BYTES);
                _tile_loadd(3, lower_sums + PANEL, SUM_BYTES);
            }
        }
        for (int64_t k = 0; k < end - begin; k += TILE_INPUTS) {
            if (streams) {
                prefetch_tile(first_panel + k * PANEL);
                prefetch_tile(next_panel + k * PANEL);
            }
            _tile_loadd(4, upper + k, x_bytes);
            _tile_loadd(6, first_panel + k * PANEL, TILE_ROW_BYTES);
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

// Whether the product was computed.
template <typename T>
bool multiply_narrow([[maybe_unused]] const Call<Linear, T>& call) {
    if constexpr (!IS_FLOAT) {
#if HAS_AMX
        if (call.linear.instructions == AMX) return multiply<Amx>(call), true;
#endif
#if HAS_AVX512_BF16
        if (call.linear.instructions == AVX512_BF16) return multiply<Avx512Bf16>(call), true;
#endif
    }
    return false;
}

template <int LANES>
using Vectors = std::conditional_t<IS_FLOAT, Floats<LANES>, Widened<LANES>>;

}  // namespace

// x: [rows, in_features], y and residual: [rows, out_features]; strides in elements. y may be the residual itself.
// Vectors wider than this processor's would be correct, too; but they take longest to compile.
extern "C" void linear(const Linear* linear, int64_t rows, const ELEMENT* x, int64_t x_stride, ELEMENT* y,
                       int64_t y_stride, const ELEMENT* residual) {
    const Call<Linear, ELEMENT> call{*linear, rows, x, x_stride, y, y_stride, residual};
    if (multiply_narrow(call)) return;
#if HAS_AVX512F
    if (linear->instructions == AVX512) return multiply<Vectors<16>>(call);
#endif
    linear->instructions == PLAIN ? multiply<Vectors<4>>(call) : multiply<Vectors<8>>(call);
}
