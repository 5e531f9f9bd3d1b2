// Tile registers of Intel AMX: leave to use them, their shapes, and what the intrinsics do not tell the compiler.
#pragma once

#include <cstdint>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
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

#if HAS_AMX

constexpr int NUM_TILES = 8;
constexpr int TILE_ROWS = 16;
constexpr int TILE_ROW_BYTES = 64;

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

#endif
