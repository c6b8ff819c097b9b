// Arguments of the functions that the thread pool calls in the library of a format: qgemm_pack packs rows of x,
// qgemm_rows multiplies them by rows of W, and qgemm_eight_bits quantizes W for "a8_g256".
#pragma once

#include <stdint.h>

// Does items first to last - 1 of the job that `argument` describes.
typedef void (*work_fn)(const void* argument, int64_t first, int64_t last);

// Quantizes x [32 * count] to `count` blocks of activations.
typedef void (*quantize_fn)(void* blocks, const float* x, int64_t count);

// Packs rows of x [m, k] in the order that a format's products read. x: float32, or blocks of activations where digits
// is 1 and `quantize` is null. Packed rows are `to_row` bytes apart; for tiles the rows' parts of the same 256 columns
// are adjacent instead, m rows together.
typedef struct {
    char* to;
    int64_t to_row;
    const char* x;
    int64_t x_row;  // bytes between rows
    quantize_fn quantize;
    int64_t m, k;
    int32_t digits, tiles;
} packing;

// 256 columns of a row of W as eight-bit codes plus 128, with their scale. The struct is padded so that the next one
// starts at a vector.
typedef struct {
    uint8_t q[256];
    float scale, unused[15];
} eight_bits;

// Quantizes columns 256 * i to 256 * i + 255 of rows of W [n, k]: row first + j goes to to[j]. w_row: bytes between
// rows.
typedef struct {
    const void* w;
    int64_t w_row, k, i;
    eight_bits* to;
} eight_bits_job;

// Interleaves rows of W [n, k] by 16 (interleaved.h). w_row: bytes between rows. to: aligned to 64 bytes.
typedef struct {
    const void* w;
    int64_t w_row, n, k;
    void* to;
} interleaving;

// y [m, n] = x [m, k] @ W [n, k].T * unit. w_row, packed_row: bytes between rows; y_row: floats between rows. table:
// levels of a codebook of floats. eight: qgemm_eight_bits of W's format, where products_eight_bits.c multiplies its
// codes. digits: int8 digits of x (0: floats). tiles: whether x is packed for tiles. interleaved: whether w is
// interleaved; w_row is then a sixteenth of the bytes of 16 rows.
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
    int32_t digits, tiles, interleaved;
} product;
