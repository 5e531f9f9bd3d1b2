// Minus infinity for the tokens that grammars forbid.

#include <cstdint>
#include <limits>

// `logits`: rows `stride` apart. Row `index[i]` of them has `words[i * num_words ..]`: bit t % 32 of word t / 32 allows
// token t.
extern "C" void mask_logits(float* logits, int64_t stride, int64_t vocab, const int64_t* index, int64_t count,
                            const uint32_t* words, int64_t num_words) {
    constexpr float forbidden = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < count; i++) {
        float* row = logits + index[i] * stride;
        const uint32_t* mask = words + i * num_words;
        for (int64_t word = 0; 32 * word < vocab; word++) {
            const uint32_t bits = mask[word];
            if (bits == ~uint32_t{0}) continue;
            float* tokens = row + 32 * word;
            const int64_t size = vocab - 32 * word < 32 ? vocab - 32 * word : 32;
            for (int64_t t = 0; t < size; t++) tokens[t] = bits >> t & 1 ? tokens[t] : forbidden;
        }
    }
}
