// y = x @ W.T (+ bias) (+ residual), or act(gate) * up, for weights of 8 or 4 bits with scales, at any number of rows.
//
// Weights lie in pairs of panels of 16 outputs, 32 bits of an output at a time: [out / 32][in / 4][32][4] for bytes,
// [out / 32][in / 8][32][4] for 4 bits: input j of 8 is the lower half of byte j % 4 if j < 4, else the upper half. A
// matrix is one stream from front to back. Integer codes are stored unsigned; a weight is (code - zero) * scale. Scales
// and zeros: [out / 32][groups][32].
//
// Each output is summed over its inputs in one order whatever the number of rows: a row's result does not depend on its
// neighbours. AMX computes 16 rows and more, and rounds otherwise than what computes fewer; but for x in 8 bits and one
// scale per output, where sums are exact.
//
// Compiled with ELEMENT, float or bfloat16, and FORMAT, one of `Format`: a plan needs one or two of the eight, and each
// takes its time. Without them it only says what this process may use.

#include <cstdint>

#include "amx.h"

#if defined(__AVX2__) && defined(__FMA__)
#define HAS_AVX2 1
#else
#define HAS_AVX2 0
#endif

// EMULATE is for tests: everything is there, if slowly, wherever AVX2 is.
#if (defined(__AVX512VNNI__) && defined(__AVX512BW__)) || (defined(EMULATE) && HAS_AVX2)
#define HAS_VNNI 1
#else
#define HAS_VNNI 0
#endif

enum Instructions : int32_t { NO_INSTRUCTIONS = 0, AVX2 = 1, AVX512_VNNI = 2, AMX = 3 };

// The best instructions this process may use.
extern "C" int32_t best_instructions() {
#ifdef EMULATE
    return HAS_VNNI ? AMX : NO_INSTRUCTIONS;
#else
    return HAS_VNNI && request_amx() ? AMX : HAS_VNNI ? AVX512_VNNI : HAS_AVX2 ? AVX2 : NO_INSTRUCTIONS;
#endif
}

#ifdef FORMAT

#include <algorithm>
#include <cmath>
#include <cstring>

#include "panel_linear.h"

#if HAS_AVX2
#include "amx_panels.h"
#include "avx2_panels.h"
#include "vnni_panels.h"
#endif

enum Format : int32_t { BYTES = 0, NIBBLES = 1, E4M3 = 2, E2M1 = 3 };
// What x is multiplied as: float32; integers of 16 bits that hold what bfloat16 does; integers of 8 bits.
enum Arithmetic : int32_t { FLOATS = 0, INTEGERS_16 = 1, INTEGERS_8 = 2 };

// Mirrored in integer_linear.py. in_features: `inputs` with padding, a multiple of 64.
struct Linear : PanelLinear {
    int64_t inputs;  // elements of a row of x
    int64_t group;   // inputs that share a scale: a multiple of `stretch`, or in_features
    // Inputs whose products are added before they are scaled: a multiple of 32; at most 256 of 16 bits, CACHED of 8.
    int64_t stretch;
    const float* scale;
    const uint8_t* zero;   // null: all are `offset`
    const int64_t* order;  // [inputs]: which element of x each input is; null: in order
    int32_t offset;
    Arithmetic arithmetic;
};

#if HAS_AVX2

namespace {

// Of FORMAT.
using Weights = std::tuple_element_t<FORMAT, std::tuple<ByteWeights, NibbleWeights, E4m3Weights, E2m1Weights>>;
#if HAS_VNNI
using WideWeights = std::tuple_element_t<FORMAT, std::tuple<WideBytes, WideNibbles, void, WideE2m1>>;
#endif

constexpr int64_t MOST_UNSCALED = 1 << 16;  // inputs: 255 * 127 * 65,536 is below 2^31

template <typename Format>
struct Layer {
    const Linear& linear;
    int64_t groups = (linear.inputs + linear.group - 1) / linear.group;
    // Whether products are added up over all inputs before they are scaled: an int32 holds them.
    bool has_one_scale = groups == 1 && linear.in_features <= MOST_UNSCALED;

    const uint8_t* panel(int64_t index) const {
        const int64_t pair_bytes = linear.in_features / Format::INPUTS * Format::ROW_STRIDE;
        return static_cast<const uint8_t*>(linear.weight) + index / 2 * pair_bytes + index % 2 * PANEL_ROW;
    }

    GroupScales scales(int64_t panel, int64_t begin) const {
        // Padding may begin a group of its own.
        const int64_t group = begin < linear.group ? 0 : std::min(begin / linear.group, groups - 1);
        const int64_t at = (panel / 2 * groups + group) * PAIR + panel % 2 * PANEL;
        return {linear.scale + at, linear.zero == nullptr ? nullptr : linear.zero + at, linear.offset};
    }
};

constexpr int64_t CACHED = 512;  // inputs of a pair of panels that stay in the first-level cache

// What all kernels have: the rows of x of a group, prepared.
template <typename Format, typename Rows, typename T>
struct Prepared : FloatSums {
    using ThisCall = Call<Linear, T>;
    struct Inputs : Rows {
        Inputs(const ThisCall& call, int64_t rows)
            : Rows(call,
                   {call.linear.inputs, call.linear.in_features, call.linear.stretch, call.linear.order},
                   rows, call.linear.arithmetic == INTEGERS_8) {}
    };

    Prepared(const ThisCall& call, const Inputs& inputs, int64_t first)
        : call(call), layer{call.linear}, x(inputs), first(first) {}

    int64_t stretch() const { return CACHED / call.linear.stretch * call.linear.stretch; }

    const ThisCall& call;
    Layer<Format> layer;
    const Inputs& x;
    const int64_t first;  // row of the group
};

// Kernel: FloatKernel, IntegerKernel or WideKernel.
template <typename Format, template <typename, int, int> class Kernel, typename T>
struct Panels : Prepared<Format, typename Kernel<Format, 1, 2>::Rows, T> {
    using Pair = PairOfPanels<Format, Kernel, Layer<Format>>;
    static constexpr int64_t BLOCK_ROWS = Pair::BLOCK_ROWS;
    using Prepared<Format, typename Kernel<Format, 1, 2>::Rows, T>::Prepared;

    static int64_t block(int64_t rows) { return Pair::block(rows); }

    void add_products(int64_t row, int64_t rows, int64_t pair, int64_t begin, int64_t end, float* sums) const {
        const int64_t stretch = this->call.linear.stretch;
        this->clear(begin, rows, sums);
        Pair::add_rows(this->layer, this->x, stretch, row - this->first, rows, pair, begin, end, sums);
    }
};

#if HAS_VNNI

// x in 8 bits, one scale per output.
template <typename Format, typename T>
struct Bytes : Prepared<Format, NarrowRows<int8_t>, T> {
    using Kernel = ByteKernel<Format>;
    static constexpr int64_t BLOCK_ROWS = Kernel::BLOCK_ROWS;
    using Prepared<Format, NarrowRows<int8_t>, T>::Prepared;

    static int64_t block(int64_t rows) { return block_of<BLOCK_ROWS>(rows); }

    void add_products(int64_t row, int64_t rows, int64_t pair, int64_t begin, int64_t end, float* sums) const {
        const int64_t stretch = this->call.linear.stretch;
        Kernel::add_rows(this->layer, this->x, stretch, row - this->first, rows, pair, begin, end, sums);
    }

    void complete(int64_t row, int64_t rows, int64_t pair, float* sums) const {
        scale_sums(this->layer, this->x, row - this->first, rows, pair, sums);
    }
};

#endif

#if HAS_AMX || defined(EMULATE)

constexpr int64_t AMX_ROWS = 16;  // from here on tiles are faster

// Element: of x in tiles.
template <typename Format, typename Element, typename T>
struct Tiles : Prepared<Format, NarrowRows<Element>, T> {
    using Kernel = TileKernel<Format, Element, Layer<Format>>;
    static constexpr int64_t BLOCK_ROWS = TILE_BLOCK;
    using Prepared<Format, NarrowRows<Element>, T>::Prepared;

    static int64_t block(int64_t rows) { return std::min(rows, BLOCK_ROWS); }

    int64_t stretch() const { return Kernel::UNPACKED / this->call.linear.stretch * this->call.linear.stretch; }

    void add_products(int64_t row, int64_t rows, int64_t pair, int64_t begin, int64_t end, float* sums) {
        const int64_t stretch = this->call.linear.stretch;
        if (this->layer.has_one_scale) {
            kernel.add_unscaled(this->layer, this->x, stretch, row - this->first, rows, pair, begin, end, sums);
        } else {
            this->clear(begin, rows, sums);
            kernel.add(this->layer, this->x, stretch, row - this->first, rows, pair, begin, end, sums);
        }
    }

    void complete(int64_t row, int64_t rows, int64_t pair, float* sums) const {
        if (this->layer.has_one_scale) scale_sums(this->layer, this->x, row - this->first, rows, pair, sums);
    }

    Kernel kernel;
};

// Whether the product was computed: of many rows, where tiles hold what x holds.
template <typename T>
bool multiply_in_tiles(const Call<Linear, T>& call) {
    const Linear& linear = call.linear;
    if (linear.instructions < AMX || call.rows < AMX_ROWS) return false;
    if (linear.arithmetic == INTEGERS_8) {
        if constexpr (FORMAT == BYTES || FORMAT == NIBBLES) {
            if (linear.stretch % TILE_ROW_BYTES == 0) return multiply<Tiles<Weights, int8_t, T>>(call), true;
        }
        return false;
    }
    if constexpr (std::is_same_v<T, bfloat16>) return multiply<Tiles<Weights, bfloat16, T>>(call), true;
    return false;
}

#endif

template <typename T>
void multiply_any(const Call<Linear, T>& call) {
    [[maybe_unused]] const Linear& linear = call.linear;
#if HAS_AMX || defined(EMULATE)
    if (multiply_in_tiles(call)) return;
#endif
    if constexpr (FORMAT == E4M3) return multiply<Panels<Weights, FloatKernel, T>>(call);
    if constexpr (std::is_same_v<T, float>) {  // bfloat16 is multiplied as integers
        if (linear.arithmetic == FLOATS) return multiply<Panels<Weights, FloatKernel, T>>(call);
    }
    if constexpr (FORMAT != E4M3) {
#if HAS_VNNI
        if (linear.instructions >= AVX512_VNNI) {
            if constexpr (FORMAT != E2M1) {
                if (linear.arithmetic == INTEGERS_8 && Layer<Weights>{linear}.has_one_scale)
                    return multiply<Bytes<Weights, T>>(call);
            }
            return multiply<Panels<WideWeights, WideKernel, T>>(call);
        }
#endif
        multiply<Panels<Weights, IntegerKernel, T>>(call);
    }
}

}  // namespace

#endif

// x: [rows, inputs], y and residual: [rows, out_features]; strides in elements. y may be the residual itself.
extern "C" void linear([[maybe_unused]] const Linear* linear, [[maybe_unused]] int64_t rows,
                       [[maybe_unused]] const ELEMENT* x, [[maybe_unused]] int64_t x_stride,
                       [[maybe_unused]] ELEMENT* y, [[maybe_unused]] int64_t y_stride,
                       [[maybe_unused]] const ELEMENT* residual) {
#if HAS_AVX2
    multiply_any<ELEMENT>({*linear, rows, x, x_stride, y, y_stride, residual});
#endif
}

#endif
