// y = x @ W.T (+ bias) (+ residual), or act(gate) * up, for weights of 8 or 4 bits with scales, at any number of rows.
//
// Weights lie in pairs of panels of 16 outputs, 32 bits of an output at a time: [out / 32][in / 4][32][4] for bytes, and
// [out / 32][in / 8][32][4] for 4 bits: input j of 8 is the lower half of byte j % 4 if j < 4, else the upper half. A
// matrix is one stream from front to back. Integer codes are stored unsigned; a weight is (code - zero) * scale. Scales
// and zeros: [out / 32][groups][32].
//
// Each output is summed over its inputs in one order whatever the number of rows: a row's result does not depend on its
// neighbours.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "panel_linear.h"

#if defined(__AVX2__) && defined(__FMA__)
#define HAS_AVX2 1
#include "avx2_panels.h"
#else
#define HAS_AVX2 0
#endif

enum Instructions : int32_t { NO_INSTRUCTIONS = 0, AVX2 = 1 };
enum Format : int32_t { BYTES = 0, NIBBLES = 1, E4M3 = 2 };
// What x is multiplied as: float32; integers of 16 bits that hold what bfloat16 does; integers of 8 bits.
enum Arithmetic : int32_t { FLOATS = 0, INTEGERS_16 = 1, INTEGERS_8 = 2 };

// What stays the same from call to call; mirrored by a ctypes structure.
struct Linear {
    int64_t inputs;        // elements of a row of x
    int64_t in_features;   // the same with padding: a multiple of 64
    int64_t out_features;  // columns of y
    int64_t group;         // inputs that share a scale: a multiple of `stretch`, or in_features
    int64_t stretch;       // inputs whose products are added before they are scaled: a multiple of 32, at most 256
    const uint8_t* weight;
    const float* scale;
    const uint8_t* zero;   // null: all are `offset`
    const float* bias;     // padded with zeros; null: none
    const int64_t* order;  // [inputs]: which element of x each input is; null: in order
    int32_t offset;
    Format format;
    Arithmetic arithmetic;
    Activation activation;
    Instructions instructions;
};

// The best instructions this process may use.
extern "C" int32_t best_instructions() { return HAS_AVX2 ? AVX2 : NO_INSTRUCTIONS; }

#if HAS_AVX2

namespace {

// Weights: a format of avx2_panels.h. Kernel: FloatKernel or IntegerKernel.
template <typename Weights, template <typename, int, int> class Kernel, typename T>
class Avx2 {
    using Rows = typename Kernel<Weights, 1, 2>::Rows;
    using Pair = Avx2Pair<Weights, Kernel, Avx2>;

public:
    using ThisCall = Call<Linear, T>;
    static constexpr int64_t BLOCK_ROWS = Pair::BLOCK_ROWS;
    static constexpr int64_t INPUT_BYTES = Rows::BYTES;
    static constexpr int64_t GROUP_BYTES = 256 << 10;  // of x, from where the second-level cache is refilled in time

    struct Inputs : Rows {
        Inputs(const ThisCall& call, int64_t rows)
            : Rows(call,
                   {call.linear.inputs, call.linear.in_features, call.linear.stretch, call.linear.order},
                   rows, call.linear.arithmetic == INTEGERS_8) {}
    };

    Avx2(const ThisCall& call, Inputs& inputs) : linear_(call.linear), call_(call), inputs_(inputs) {}

    void prepare(int64_t first, int64_t last) {
        first_ = first;
        inputs_.prepare(call_, first, last);
    }

    static int64_t block(int64_t rows) { return Pair::block(rows); }
    int64_t stretch() const { return std::max<int64_t>(1, CACHED / linear_.stretch) * linear_.stretch; }

    void add_products(int64_t row, int64_t rows, int64_t pair, int64_t begin, int64_t end, float* sums) const {
        Pair::add_rows(*this, inputs_, linear_.stretch, row - first_, rows, pair, begin, end, sums);
    }

    const uint8_t* panel(int64_t index) const {
        const int64_t pair_bytes = linear_.in_features / Weights::INPUTS * Weights::ROW_STRIDE;
        return linear_.weight + index / 2 * pair_bytes + index % 2 * PANEL_ROW;
    }

    GroupScales scales(int64_t panel, int64_t begin) const {
        const int64_t groups = (linear_.inputs + linear_.group - 1) / linear_.group;
        const int64_t group = std::min(begin / linear_.group, groups - 1);  // padding may begin a group of its own
        const int64_t at = (panel / 2 * groups + group) * PAIR + panel % 2 * PANEL;
        return {linear_.scale + at, linear_.zero == nullptr ? nullptr : linear_.zero + at, linear_.offset};
    }

private:
    static constexpr int64_t CACHED = 256;  // inputs of a pair of panels that stay in the first-level cache

    const Linear& linear_;
    const ThisCall& call_;
    Inputs& inputs_;
    int64_t first_ = 0;
};

template <typename T>
void multiply_avx2(const Call<Linear, T>& call) {
    const bool floats = call.linear.arithmetic == FLOATS;
    switch (call.linear.format) {
        case BYTES:
            if (floats) return multiply<Avx2<ByteWeights, FloatKernel, T>>(call);
            return multiply<Avx2<ByteWeights, IntegerKernel, T>>(call);
        case NIBBLES:
            if (floats) return multiply<Avx2<NibbleWeights, FloatKernel, T>>(call);
            return multiply<Avx2<NibbleWeights, IntegerKernel, T>>(call);
        case E4M3: return multiply<Avx2<E4m3Weights, FloatKernel, T>>(call);
    }
}

}  // namespace

// x: [rows, inputs], y and residual: [rows, out_features]; strides in elements. y may be the residual itself.
#define DEFINE_LINEAR(NAME, T)                                                                                      \
    extern "C" void NAME(const Linear* linear, int64_t rows, const T* x, int64_t x_stride, T* y, int64_t y_stride, \
                         const T* residual) {                                                                       \
        multiply_avx2<T>({*linear, rows, x, x_stride, y, y_stride, residual});                                      \
    }
#else
#define DEFINE_LINEAR(NAME, T) \
    extern "C" void NAME(const Linear*, int64_t, const T*, int64_t, T*, int64_t, const T*) {}
#endif

DEFINE_LINEAR(linear_float32, float)
DEFINE_LINEAR(linear_bfloat16, bfloat16)
