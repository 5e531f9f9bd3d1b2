// Reads memory as fast as all threads can: what streams weights cannot be faster.

#include <atomic>
#include <cstdint>

#include "thread_pool.h"

constexpr int64_t LINE = 64, PREFETCH = 1024, LINES = 8;
constexpr int64_t MOST_BLOCKS = 2048;  // of LINES lines, a mebibyte at a time

// from: `bytes`, a multiple of LINES lines. The sum keeps the compiler from leaving the reads out.
extern "C" void read_all(const uint64_t* from, int64_t bytes, uint64_t* sum) {
    constexpr int64_t WORDS = LINES * LINE / sizeof(uint64_t);
    const int64_t blocks = bytes / (LINES * LINE);
    std::atomic<uint64_t> total{0};
    parallel(blocks, MOST_BLOCKS, bytes, [&](Pieces& pieces) {
        uint64_t part = 0;
        while (pieces.take())
            for (int64_t block = pieces.first; block < pieces.last; block++) {
                const uint64_t* words = from + block * WORDS;
                for (int64_t line = 0; line < LINES; line++)
                    __builtin_prefetch(reinterpret_cast<const char*>(words) + PREFETCH + line * LINE);
#pragma omp simd reduction(+ : part)
                for (int64_t i = 0; i < WORDS; i++) part += words[i];
            }
        total += part;
    });
    *sum = total;
}
