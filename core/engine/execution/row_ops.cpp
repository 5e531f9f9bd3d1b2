// What else is between the kernels of a recorded function: rows copied, looked up, widened and searched, and where the
// tokens of a chain go. Matrices are rows of contiguous elements; strides are in elements unless they say bytes.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "element.h"

namespace {

constexpr int POISON = 0xFF;  // of a row that is not there: -1 as an integer, NaN as a float

template <typename T>
void argmax(int64_t rows, int64_t columns, const T* x, int64_t x_stride, int64_t* y) {
    for (int64_t row = 0; row < rows; row++) {
        const T* values = x + row * x_stride;
        float largest = widen(values[0]);
#pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < columns; i++) largest = std::max(largest, widen(values[i]));
        int64_t first = 0;
        while (first < columns - 1 && widen(values[first]) != largest) first++;
        y[row] = first;
    }
}

}  // namespace

// The first of the largest elements of each row; of a row with a NaN any place in it.
extern "C" void argmax_float(int64_t rows, int64_t columns, const float* x, int64_t x_stride, int64_t* y) {
    argmax(rows, columns, x, x_stride, y);
}

extern "C" void argmax_bfloat16(int64_t rows, int64_t columns, const bfloat16* x, int64_t x_stride, int64_t* y) {
    argmax(rows, columns, x, x_stride, y);
}

extern "C" void widen_bfloat16(int64_t count, const bfloat16* x, float* y) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) y[i] = widen(x[i]);
}

extern "C" void copy_rows(int64_t rows, int64_t row_bytes, const char* from, int64_t from_bytes, char* to,
                          int64_t to_bytes) {
    for (int64_t row = 0; row < rows; row++) std::memcpy(to + row * to_bytes, from + row * from_bytes, row_bytes);
}

// Several tensors at once.
extern "C" void copy_many(int64_t count, const char* const* from, char* const* to, const int64_t* bytes) {
    for (int64_t i = 0; i < count; i++) std::memcpy(to[i], from[i], bytes[i]);
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

// Mirrored by a ctypes structure.
struct Chains {
    const int32_t* tables;  // block tables by slot: [slots, table_stride]
    int64_t table_stride, block_size, rows;
    const int64_t* slots;  // [rows]
    int64_t* lengths;      // [rows]: tokens computed, so the position of the next one
    int64_t* positions;    // [rows]
    int64_t* slot_mapping;  // [rows]
    int32_t* blocks;        // [rows, table_stride]: the rows of the block tables
    int32_t* kv_lens;       // [rows]
    int64_t* drafts;        // [rows, most]
    int64_t most, made;
};

// Where the next token of each chain goes.
extern "C" void place_chains(Chains* chains) {
    for (int64_t row = 0; row < chains->rows; row++) {
        const int64_t position = chains->lengths[row], block = position / chains->block_size;
        const int32_t* table = chains->tables + chains->slots[row] * chains->table_stride;
        chains->positions[row] = position;
        chains->slot_mapping[row] = table[block] * chains->block_size + position % chains->block_size;
        chains->kv_lens[row] = static_cast<int32_t>(position + 1);
        std::copy_n(table, block + 1, chains->blocks + row * chains->table_stride);
    }
}

// The next draft of each chain; advance: keys of one token more are there.
extern "C" void grow_chains(Chains* chains, const int64_t* tokens, int64_t advance) {
    for (int64_t row = 0; row < chains->rows; row++) {
        chains->drafts[row * chains->most + chains->made] = tokens[row];
        chains->lengths[row] += advance;
    }
    chains->made++;
}
