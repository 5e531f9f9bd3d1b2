// What else lies between the layers: rows copied, looked up and widened, and where the tokens of a step and of
// chains go. Matrices are rows of contiguous elements; strides are in elements unless they say bytes.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "element.h"

constexpr int POISON = 0xFF;  // of a row that is not there: -1 as an integer, NaN as a float

extern "C" void widen_bfloat16(int64_t count, const bfloat16* x, float* y) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) y[i] = widen(x[i]);
}

extern "C" void copy_rows(int64_t rows, int64_t row_bytes, const char* from, int64_t from_bytes, char* to,
                          int64_t to_bytes) {
    for (int64_t row = 0; row < rows; row++) std::memcpy(to + row * to_bytes, from + row * from_bytes, row_bytes);
}

// to[i] = table[index[i]]; an index outside of the table finds POISON.
extern "C" void gather_rows(const char* table, int64_t table_rows, int64_t row_bytes, const int64_t* index,
                            int64_t count, char* to) {
    for (int64_t i = 0; i < count; i++) {
        const bool is_there = 0 <= index[i] && index[i] < table_rows;
        if (is_there) std::memcpy(to + i * row_bytes, table + index[i] * row_bytes, row_bytes);
        else std::memset(to + i * row_bytes, POISON, row_bytes);
    }
}

// to[i] = table[index[i] - start]; a row outside of the table is 0.
extern "C" void gather_own_rows(const char* table, int64_t start, int64_t table_rows, int64_t row_bytes,
                                const int64_t* index, int64_t count, char* to) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t at = index[i] - start;
        const bool is_there = 0 <= at && at < table_rows;
        if (is_there) std::memcpy(to + i * row_bytes, table + at * row_bytes, row_bytes);
        else std::memset(to + i * row_bytes, 0, row_bytes);
    }
}

// Where a program's tokens are; mirrored by a ctypes structure.
struct Metadata {
    int64_t *positions, *slots;    // [tokens], [groups, most]; slots: where keys and values go
    int32_t *q_starts, *kv_lens;   // [rows + 1], [rows]
    int32_t* blocks;               // [groups, most, stride]
    int64_t stride, most, groups;  // most: rows and tokens there is room for; groups: of the cache

    int64_t* group_slots(int64_t group) const { return slots + group * most; }
    int32_t* group_blocks(int64_t group) const { return blocks + group * most * stride; }
};

// A batch of `rows` rows, as one of as many rows as tokens: those that are missing have no queries. Of the groups but
// the first, only what differs.
extern "C" void fill_metadata(const Metadata* to, int64_t group, int64_t tokens, int64_t rows, const int64_t* positions,
                              const int64_t* slots, const int32_t* q_starts, const int32_t* kv_lens,
                              const int32_t* blocks, int64_t columns, int64_t stride) {
    int32_t* to_blocks = to->group_blocks(group);
    std::copy_n(slots, tokens, to->group_slots(group));
    for (int64_t row = 0; row < rows; row++) std::copy_n(blocks + row * stride, columns, to_blocks + row * to->stride);
    if (group > 0) return;
    std::copy_n(positions, tokens, to->positions);
    std::copy_n(q_starts, rows + 1, to->q_starts);
    std::fill(to->q_starts + rows + 1, to->q_starts + tokens + 1, static_cast<int32_t>(tokens));
    std::copy_n(kv_lens, rows, to->kv_lens);
}

// Mirrored by a ctypes structure.
struct Chains {
    const int32_t* tables;  // [groups, requests, table_stride]: block tables of all requests
    int64_t group_stride, table_stride, block_size;
    Metadata to;                // of the tokens that are computed next, one a row
    const int64_t* table_rows;  // [rows]: each chain's row of the tables
    int64_t* lengths;           // [rows]: tokens computed, so the position of the next one
    int64_t* tokens;            // [rows]: that one
    int64_t* drafts;            // [rows, most]
    int64_t most, rows, made;
};

extern "C" void place_chains(Chains* chains) {
    const Metadata& to = chains->to;
    for (int64_t row = 0; row < chains->rows; row++) {
        const int64_t position = chains->lengths[row], block = position / chains->block_size;
        to.positions[row] = position;
        to.q_starts[row] = static_cast<int32_t>(row);
        to.kv_lens[row] = static_cast<int32_t>(position + 1);
        const int32_t* table = chains->tables + chains->table_rows[row] * chains->table_stride;
        for (int64_t group = 0; group < to.groups; group++, table += chains->group_stride) {
            to.group_slots(group)[row] = table[block] * chains->block_size + position % chains->block_size;
            std::copy_n(table, block + 1, to.group_blocks(group) + row * to.stride);
        }
    }
    to.q_starts[chains->rows] = static_cast<int32_t>(chains->rows);
}

// The next draft of each chain; advance: keys of one token more are there.
extern "C" void grow_chains(Chains* chains, const int64_t* tokens, int64_t advance) {
    for (int64_t row = 0; row < chains->rows; row++) {
        chains->drafts[row * chains->most + chains->made] = chains->tokens[row] = tokens[row];
        chains->lengths[row] += advance;
    }
    chains->made++;
}
