// Writing what another processor reads next.
//
// A line that others have read is theirs, too, and must be fetched and taken from them before it can be written: at a
// tenth of the rate of memory. Stores past the caches need nothing of that; for a few lines they take longer.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t PAST_CACHES = 2048;  // bytes from which on

inline void put(char* to, const char* from, int64_t bytes) {
#if defined(__x86_64__)
    if (bytes >= PAST_CACHES) {
        constexpr int64_t LANE_BYTES = sizeof(__m128i);
        const int64_t head = -reinterpret_cast<intptr_t>(to) & (LANE_BYTES - 1);
        std::memcpy(to, from, head);
        to += head;
        from += head;
        bytes -= head;
        for (; bytes >= 4 * LANE_BYTES; to += 4 * LANE_BYTES, from += 4 * LANE_BYTES, bytes -= 4 * LANE_BYTES) {
            __m128i lanes[4];
            std::memcpy(lanes, from, sizeof lanes);
            for (int i = 0; i < 4; i++) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, lanes[i]);
        }
        std::memcpy(to, from, bytes);
        _mm_sfence();  // before others are told
        return;
    }
#endif
    std::memcpy(to, from, bytes);
}

}  // namespace
