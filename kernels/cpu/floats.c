// y [m, n] = x [m, k] @ W [n, k].T for one format whose weights are floats: plain numbers, or levels of a table.
//
// The format's header defines PLAIN and sixteen_weights(blocks, i), weights 16 i to 16 i + 15 as decoding rounds them;
// or it unpacks codes in the order of the weights, which index product.table.
#include "blocks.h"

#include "float_tiles.h"

// Decodes 256 weights, in order.
INLINE void decode_super(f32x16 w[16], const uint8_t* blocks, const levels* table) {
#ifdef PLAIN
    (void)table;
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) w[i] = sixteen_weights(blocks, i);
#else
    const unpacked super = unpack(blocks);
    uint8_t codes[SUPER];
    float scale[16];
    memcpy(codes, super.codes, sizeof codes), memcpy(scale, &super.scale, sizeof scale);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
        w[i] = mul_all(decode_level(table, load_bytes_as_ints(codes + 16 * i)), scale[i * GROUPS / 16]);
#endif
}

#include "decode.h"

// Packs rows first to last - 1 of x: one thread's share.
void qgemm_pack(const void* argument, int64_t first, int64_t last) {
    const packing* p = argument;
    const word_order words = make_word_order();
    for (int64_t row = first; row < last; ++row) pack_for_panels(p, row, (const float*)(p->x + row * p->x_row), &words);
}

int64_t qgemm_packed_bytes(int32_t digits, int32_t tiles, int64_t k) {
    (void)digits, (void)tiles;
    return packed_float_bytes(k);
}

#define DIGITS 0
#define MAX_TOKENS 4
#define ROWS_HEADER "float_rows.h"
#include "token_ladder.h"

// Multiplies rows first to last - 1 of W by all rows of x: one thread's share. Tiles accept a multiple of
// TOKENS_OF_TILE rows of x, up to MOST_TOKENS.
void qgemm_rows(const void* argument, int64_t first, int64_t last) {
    const product* p = argument;
    const uint64_t mode = enter_ieee_mode();
    if (p->tiles)
        float_tiles(p, p->m, first, last);
    else
        multiply_rows_0(p, 0, first, last);
    restore_mode(mode);
}
