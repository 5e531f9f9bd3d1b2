// Tile registers of Intel AMX: leave to use them, their shapes, and what the intrinsics do not tell the compiler.
#pragma once

#include <cstdint>

#if !defined(EMULATE) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && \
    defined(__AVX512BF16__) && defined(__linux__)
#define HAS_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAS_AMX 0
#endif

// Linux gives the large AMX state only to processes that ask (ARCH_REQ_XCOMP_PERM of XTILEDATA), and may refuse.
inline bool request_amx() {
#if HAS_AMX
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return false;
#endif
}

constexpr int NUM_TILES = 8;
constexpr int TILE_ROWS = 16;
constexpr int TILE_ROW_BYTES = 64;

#if HAS_AMX

// Before tiles are loaded from what was just written: GCC's intrinsics for loads do not say that they read memory.
inline void written(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

// All eight tiles, with rows of 64 bytes. Release them at the end, or every context switch saves them.
inline void shape_tiles(const int (&tile_rows)[NUM_TILES]) {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } shapes;
    for (int tile = 0; tile < NUM_TILES; tile++) {
        shapes.rows[tile] = static_cast<uint8_t>(tile_rows[tile]);
        shapes.row_bytes[tile] = TILE_ROW_BYTES;
    }
    written(&shapes);
    _tile_loadconfig(&shapes);
}

#elif defined(EMULATE)

// For tests on any machine: the instructions in plain C++, under the names of their intrinsics.

#include <cstring>

#include <immintrin.h>

#include "element.h"

inline thread_local uint8_t emulated_tiles[NUM_TILES][TILE_ROWS][TILE_ROW_BYTES];
inline thread_local int emulated_rows[NUM_TILES];

inline void written(const void*) {}
inline void shape_tiles(const int (&tile_rows)[NUM_TILES]) { std::memcpy(emulated_rows, tile_rows, sizeof tile_rows); }

template <int TILE>
inline void clear_emulated_tile() {
    std::memset(emulated_tiles[TILE], 0, sizeof emulated_tiles[TILE]);
}

template <int TILE>
inline void load_emulated_tile(const void* from, int64_t stride) {
    for (int row = 0; row < emulated_rows[TILE]; row++)
        std::memcpy(emulated_tiles[TILE][row], static_cast<const char*>(from) + row * stride, TILE_ROW_BYTES);
}

template <int TILE>
inline void store_emulated_tile(void* to, int64_t stride) {
    for (int row = 0; row < emulated_rows[TILE]; row++)
        std::memcpy(static_cast<char*>(to) + row * stride, emulated_tiles[TILE][row], TILE_ROW_BYTES);
}

// Sum and elements of tiles by their types; PER elements of an input row for every sum.
template <int SUMS, int X, int WEIGHTS, int PER, typename Sum, typename Input, typename Weight, typename Product>
inline void add_emulated_products(Product product) {
    for (int row = 0; row < emulated_rows[SUMS]; row++) {
        Sum sums[16];
        Input x[TILE_ROW_BYTES / sizeof(Input)];
        std::memcpy(sums, emulated_tiles[SUMS][row], sizeof sums);
        std::memcpy(x, emulated_tiles[X][row], sizeof x);
        for (int k = 0; k < emulated_rows[WEIGHTS]; k++) {
            Weight weights[TILE_ROW_BYTES / sizeof(Weight)];
            std::memcpy(weights, emulated_tiles[WEIGHTS][k], sizeof weights);
            for (int i = 0; i < 16 * PER; i++) sums[i / PER] += product(x[PER * k + i % PER], weights[i]);
        }
        std::memcpy(emulated_tiles[SUMS][row], sums, sizeof sums);
    }
}

#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_release() static_cast<void>(0)
#define _tile_zero(tile) clear_emulated_tile<tile>()
#define _tile_loadd(tile, from, stride) load_emulated_tile<tile>(from, stride)
#define _tile_stored(tile, to, stride) store_emulated_tile<tile>(to, stride)
#define _tile_dpbf16ps(sums, x, weights)                                         \
    add_emulated_products<sums, x, weights, 2, float, bfloat16, bfloat16>(       \
        [](bfloat16 one, bfloat16 other) { return widen(one) * widen(other); })
#define _tile_dpbsud(sums, x, weights)                                      \
    add_emulated_products<sums, x, weights, 4, int32_t, int8_t, uint8_t>(   \
        [](int8_t one, uint8_t other) { return int32_t{one} * int32_t{other}; })

#endif
