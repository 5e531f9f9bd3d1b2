// Reads memory as fast as all threads can: what streams weights cannot be faster.

#include <cstdint>

#include <omp.h>

constexpr int64_t LINE = 64, PREFETCH = 1024, LINES = 8;

// from: `bytes`, a multiple of LINES lines. The sum keeps the compiler from leaving the reads out.
extern "C" void read_all(const uint64_t* from, int64_t bytes, uint64_t* sum) {
    constexpr int64_t WORDS = LINES * LINE / sizeof(uint64_t);
    const int64_t blocks = bytes / (LINES * LINE);
    uint64_t total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total)
    for (int64_t block = 0; block < blocks; block++) {
        const uint64_t* words = from + block * WORDS;
        for (int64_t line = 0; line < LINES; line++)
            __builtin_prefetch(reinterpret_cast<const char*>(words) + PREFETCH + line * LINE);
        uint64_t part = 0;
#pragma omp simd reduction(+ : part)
        for (int64_t i = 0; i < WORDS; i++) part += words[i];
        total += part;
    }
    *sum = total;
}
