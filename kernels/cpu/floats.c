// y [m, n] = x [m, k] @ W [n, k].T of one format whose weights are floats: plain numbers, or levels of a table.
//
// A header says PLAIN and has sixteen(blocks, i), the numbers of weights 16 i .. 16 i + 15; or it unpacks codes in the
// order of the weights, which are numbers of product.table. A weight is rounded as decoding rounds it.
#include "blocks.h"

#include "panels.h"

// 256 weights of a row, in order.
INLINE void weights_of(f32x16 w[16], const uint8_t* blocks, const levels* table) {
#ifdef PLAIN
    (void)table;
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) w[i] = sixteen(blocks, i);
#else
    const unpacked found = unpack(blocks);
    uint8_t codes[SUPER];
    float scale[16];
    memcpy(codes, found.codes, sizeof codes), memcpy(scale, &found.scale, sizeof scale);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) w[i] = mul_all(level_of(table, sixteen_ints(codes + 16 * i)), scale[i * GROUPS / 16]);
#endif
}

#include "decode.h"

// Rows first .. last - 1 of x: what a thread does.
void qgemm_pack(const void* argument, int64_t first, int64_t last) {
    const packing* p = argument;
    const word_order words = order_of_words();
    for (int64_t row = first; row < last; ++row) pack_for_panels(p, row, (const float*)(p->x + row * p->x_row), &words);
}

int64_t qgemm_packed_bytes(int32_t digits, int32_t tiles, int64_t k) {
    (void)digits, (void)tiles;
    return bytes_of_floats(k);
}

#define TOKENS 4
#include "float_rows.h"
#undef TOKENS
#define TOKENS 2
#include "float_rows.h"
#undef TOKENS
#define TOKENS 1
#include "float_rows.h"

// Rows first .. last - 1 of W by all rows of x: what a thread does. Tiles take a multiple of TOKENS_OF_TILE rows of x,
// up to MOST_TOKENS.
void qgemm_rows(const void* argument, int64_t first, int64_t last) {
    const product* p = argument;
    const uint64_t mode = ieee_mode();
    int64_t token = 0;
    if (p->tiles) {
        float_tiles(p, first, last);
    } else {
        for (; token + 4 <= p->m; token += 4) float_rows_4(p, token, first, last);
        for (; token + 2 <= p->m; token += 2) float_rows_2(p, token, first, last);
        for (; token < p->m; ++token) float_rows_1(p, token, first, last);
    }
    restore_mode(mode);
}
