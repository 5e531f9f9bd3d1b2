// Tokens of drafts from logits: what choose() of choose.py says of the same rows, within the rounding of logarithms.
// That costs acceptance at most: verification decides.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "thread_pool.h"

namespace {

constexpr uint32_t SAMPLE = 0;  // purpose of the noise, as in philox.py
constexpr float HIGHEST = 1.0f - 0x1p-24f;
constexpr float SPAN = 41.0f;  // more than two draws of the noise can differ by

// Sampling parameters by row of the device tables, as SamplingState keeps them; mirrored by a ctypes structure.
struct Columns {
    const float* floats;  // [5, rows]: temperature, min_p, then penalties, which drafts do without
    const double* top_p;  // [rows]
    const int64_t* ints;  // [4, rows]: top_k, seed, prompt_len, min_tokens
    int64_t rows;
};

// Philox4x32-10: see philox.py. One of the four words of the block that entry `index` is in.
uint32_t word(uint64_t seed, uint64_t position, uint64_t index) {
    uint32_t c[4] = {static_cast<uint32_t>(index >> 2), SAMPLE, static_cast<uint32_t>(position),
                     static_cast<uint32_t>(position >> 32)};
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = uint64_t{c[0]} * 0xD2511F53u, p1 = uint64_t{c[2]} * 0xCD9E8D57u;
        const uint32_t next[4] = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
                                  static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
        std::copy_n(next, 4, c);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c[index & 3];
}

float gumbel(uint64_t seed, uint64_t position, uint64_t index) {
    const float unit = std::min((static_cast<float>(word(seed, position, index)) + 0.5f) * 0x1p-32f, HIGHEST);
    return -std::log(-std::log1p(-unit));
}

struct Candidate {
    float scaled;
    int64_t column;
};

// The lowest scaled logit that top-k and top-p leave. `found`: descending.
float ranked_border(const std::vector<Candidate>& found, int64_t top_k, double top_p, double total) {
    float border = -std::numeric_limits<float>::infinity();
    size_t kept = found.size();
    if (top_k > 0 && top_k <= static_cast<int64_t>(found.size())) {
        border = found[top_k - 1].scaled;
        while (kept > 0 && found[kept - 1].scaled < border) kept--;
    }
    if (top_p >= 1.0) return border;
    if (top_k > 0) {
        total = 0.0;
        for (size_t i = 0; i < kept; i++) total += std::exp(found[i].scaled);
    }
    double before = 0.0;
    for (size_t i = 0; i < kept && (i == 0 || before < top_p * total); i++) {
        border = found[i].scaled;
        before += std::exp(found[i].scaled);
    }
    return border;
}

int64_t choose_one(const Columns& of, int64_t row, int64_t position, const float* logits, int64_t size,
                   const int64_t* ids) {
    float largest = logits[0];
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < size; i++) largest = std::max(largest, logits[i]);
    int64_t best = 0;  // of a row with a NaN any place in it
    while (best < size - 1 && logits[best] != largest) best++;
    const float temperature = of.floats[row];
    if (temperature == 0.0f || !std::isfinite(largest)) return best;
    const float min_p = of.floats[of.rows + row];
    const int64_t top_k = of.ints[row] < size ? of.ints[row] : 0;
    const double top_p = of.top_p[row];
    const bool ranks = top_k > 0 || top_p < 1.0;
    float border = std::max(-SPAN, min_p > 0.0f ? std::log(min_p) : -SPAN);
    std::vector<Candidate> found;
    double total = 0.0;
    for (int64_t i = 0; i < size; i++) {
        const float scaled = (logits[i] - largest) / temperature;
        if (top_p < 1.0 && top_k == 0) total += std::exp(scaled);
        if (scaled >= (ranks ? -SPAN : border)) found.push_back({scaled, i});
    }
    if (ranks) {
        std::sort(found.begin(), found.end(), [](auto& a, auto& b) { return a.scaled > b.scaled; });
        border = std::max(border, ranked_border(found, top_k, top_p, total));
    }
    const uint64_t seed = of.ints[of.rows + row], output = position + 1 - of.ints[2 * of.rows + row];
    float highest = -std::numeric_limits<float>::infinity();
    int64_t chosen = best;
    for (const Candidate& one : found) {
        if (one.scaled < border) continue;
        const float score = one.scaled + gumbel(seed, output, ids ? ids[one.column] : one.column);
        if (score > highest || (score == highest && one.column < chosen)) highest = score, chosen = one.column;
    }
    return chosen;
}

}  // namespace

// Row i of logits [count, size] gets the token after position positions[i] + offset of row table_rows[i]. ids: the
// token that each column stands for, or null.
extern "C" void choose_tokens(const Columns* columns, const int64_t* table_rows, const int64_t* positions,
                              int64_t offset, int64_t count, const float* logits, int64_t size, const int64_t* ids,
                              int64_t* tokens) {
    parallel_for(count, count * size * 8, [&](int64_t i) {
        const int64_t column =
            choose_one(*columns, table_rows[i], positions[i] + offset, logits + i * size, size, ids);
        tokens[i] = ids ? ids[column] : column;
    });
}
