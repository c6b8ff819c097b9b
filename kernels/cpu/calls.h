// What the pool of threads tells the library of a format: rows of x to pack, rows of W to multiply by.
#pragma once

#include <stdint.h>

// A share of a job: items first .. last - 1 of what `argument` says.
typedef void (*work_fn)(const void* argument, int64_t first, int64_t last);

// x [32 count] -> blocks of activations.
typedef void (*quantize_fn)(void* blocks, const float* x, int64_t count);

// Rows of x as the products of a format take them. x: float32, or blocks of activations where digits are 1 and there is
// no `quantize`. Packed rows are `to_row` bytes apart; for tiles those of 256 columns lie side by side, m rows
// together.
typedef struct {
    char* to;
    int64_t to_row;
    const char* x;
    int64_t x_row;  // bytes from a row to the next
    quantize_fn quantize;
    int64_t m, k;
    int32_t digits, tiles;
} packing;

// 256 columns of a row of W as codes of eight bits, 128 above, and what they count in; the next begin at a vector.
typedef struct {
    uint8_t q[256];
    float scale, unused[15];
} eight_bits;

// Columns 256 i on of rows of W [n, k] as codes of eight bits: row first + j to to[j]. w_row: bytes from a row to the
// next.
typedef struct {
    const void* w;
    int64_t w_row, k, i;
    eight_bits* to;
} eight_bits_job;

// y [m, n] = x [m, k] @ W [n, k].T. w_row, packed_row: bytes from a row to the next; y_row: numbers. table: levels of a
// codebook of floats. eight: of the library of W's format, where another multiplies what it makes. unit: what all sums
// are multiplied by.
typedef struct {
    const void* w;
    int64_t w_row;
    const void* packed;
    int64_t packed_row;
    float* y;
    int64_t y_row;
    const void* table;
    work_fn eight;
    int64_t m, n, k;
    float unit;
    int32_t digits, tiles;
} product;
