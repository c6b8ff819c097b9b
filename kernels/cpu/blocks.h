// Super-blocks (256 weights) of a row of W, and tiles of 16 rows of them, for integer and float products.
//
// Macros from the compiler's command line (qgemm/cpu/native/libraries.py): FORMAT_HEADER, the header of the format;
// BLOCK_BYTES, BLOCK_WEIGHTS; TOKENS_OF_TILE, the multiple of rows of x that tiles accept; MOST_TOKENS, the maximum.
#pragma once

#include FORMAT_HEADER

#include "row_panels.h"

#define SUPER_BYTES (SUPER / BLOCK_WEIGHTS * BLOCK_BYTES)
#ifndef ZERO
#define ZERO 0
#endif
#ifndef SHIFT
#define SHIFT 0
#endif
#ifndef MINIMUM
#define MINIMUM 0
#endif

// Super-block i of a row: its address in W, or that of a copy in `padded` with zeros after the last block.
INLINE const uint8_t* read_super(const product* p, int64_t row, int64_t i, uint8_t padded[SUPER_BYTES]) {
    const uint8_t* blocks = (const uint8_t*)p->w + row * p->w_row + i * SUPER_BYTES;
    const int64_t left = p->k - i * SUPER;
    if (left >= SUPER) return blocks;
    memset(padded, 0, SUPER_BYTES);
    memcpy(padded, blocks, left / BLOCK_WEIGHTS * BLOCK_BYTES);
    return padded;
}

// Short rows whose columns are no multiple of 256, of a format with smaller blocks, are multiplied by super-blocks that
// span rows (spanning_rows.h): x begins again after its last column until a super-block ends there, at most SPANNED.
#if BLOCK_WEIGHTS < SUPER && !defined(LANE_SCALES)
#define SPANNING
#endif
enum { SPANNED = 16 };

INLINE int spans_rows(int64_t k) {
#ifdef SPANNING
    const int64_t step = k & -k;  // the power of two in k
    return step < SUPER && k / step <= SPANNED;
#else
    return (void)k, 0;
#endif
}

// Super-blocks of a packed row of x, for products row by row.
INLINE int64_t supers_of_x(int64_t k) { return spans_rows(k) ? k / (k & -k) : (k + SUPER - 1) / SUPER; }

// The columns of super-block i that tiles multiply: on AVX2 without those after column k, where x is 0 and adds nothing
// to a sum (but for the sign of a zero that a sum underflowed to).
INLINE int multiplied_columns(const product* p, int64_t i) {
    const int64_t left = p->k - i * SUPER;
    return PARTS == 2 && left < SUPER ? (int)left : SUPER;
}

// Transposes `count` floats of four rows into columns r to r + 3 of `to`; number i goes to row position[i], or to row i
// where position is null.
INLINE void place_rows(float (*to)[TILE_ROWS], int r, const float* const rows[4], int count, const uint8_t* position) {
    for (int i = 0; i < count; i += 4) {
        f32x4 square[4];
        for (int j = 0; j < 4; ++j) memcpy(&square[j], rows[j] + i, sizeof square[j]);
        transpose4(square);
        for (int j = 0; j < 4; ++j) memcpy(&to[position ? position[i + j] : i + j][r], &square[j], sizeof square[j]);
    }
}

#ifdef GROUPS  // defined by formats with codes, not by plain ones
#ifdef RAW
#ifndef OWN_UNPACK
INLINE unpacked unpack(const uint8_t* blocks) {
    unpacked w;
    u8x64 bytes[RAW];
    load_raw(bytes, blocks), raw_to_codes(w.codes, bytes), load_scales(&w, blocks);
    return w;
}
#endif

// Loads the vectors that raw_to_codes decodes, and the scales and minimums.
INLINE void load_raw_row(u8x64 bytes[RAW], unpacked* w, const uint8_t* blocks) {
    load_raw(bytes, blocks), load_scales(w, blocks);
}
#else
#define RAW 4
INLINE void raw_to_codes(u8x64 codes[4], const u8x64 bytes[4]) {
    codes[0] = bytes[0], codes[1] = bytes[1], codes[2] = bytes[2], codes[3] = bytes[3];
}

INLINE void load_raw_row(u8x64 bytes[4], unpacked* w, const uint8_t* blocks) {
    *w = unpack(blocks);
    raw_to_codes(bytes, w->codes);
}
#endif

// ---- words of four codes, ordered by group

#define GROUP_WORDS (SUPER / 4 / GROUPS)

typedef struct {
    uint8_t position[64];  // the place of word i of the code vectors, when words are sorted by group
} word_order;

INLINE word_order make_word_order(void) {
    word_order result;
    int count[GROUPS] = {0};
    for (int i = 0; i < 64; ++i) {
        const int group = WEIGHT_OF(i / 16, 4 * (i % 16)) * GROUPS / SUPER;
        result.position[i] = (uint8_t)(group * GROUP_WORDS + count[group]++);
    }
    return result;
}

#ifndef RUN
#define RUN 16
#endif

// Copies 256 bytes of x into the order of the slots.
INLINE void order_by_slots(int8_t* to, const int8_t* from) {
    for (int slot = 0; slot < SUPER; slot += RUN) memcpy(to + slot, from + WEIGHT_OF(slot / 64, slot % 64), RUN);
}

// Copies 256 numbers of `size` bytes each into the order of the words of a tile.
INLINE void order_by_words(void* to, const void* from, int size, const word_order* words) {
    for (int slot = 0; slot < SUPER; slot += RUN)
        memcpy((char*)to + size * (4 * words->position[slot / 4] + slot % 4),
               (const char*)from + size * WEIGHT_OF(slot / 64, slot % 64), size * RUN);
}

// Interleaved weights have a kernel for few rows of x where groups are lanes of an accumulator.
#if defined(LANES) && !defined(LANE_SCALES)
#define INTERLEAVED_ROWS
#endif
#include "interleaved.h"
#endif
