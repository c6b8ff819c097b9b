// Super-blocks of a row, and blocks of 16 rows of W as a tile of codes, for products in integers and in floats.
//
// Macros of the compiler's command line (qgemm/cpu/native/libraries.py): FORMAT_HEADER, BLOCK_BYTES, BLOCK_WEIGHTS;
// TOKENS_OF_TILE and MOST_TOKENS, rows of x.
#pragma once

#include FORMAT_HEADER

#include "panel_rows.h"

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

// 256 weights of a row from column 256 i on: where they lie, or a copy in `padded` with zeros behind the last block.
INLINE const uint8_t* super_of(const product* p, int64_t row, int64_t i, uint8_t padded[SUPER_BYTES]) {
    const uint8_t* blocks = (const uint8_t*)p->w + row * p->w_row + i * SUPER_BYTES;
    const int64_t left = p->k - i * SUPER;
    if (left >= SUPER) return blocks;
    memset(padded, 0, SUPER_BYTES);
    memcpy(padded, blocks, left / BLOCK_WEIGHTS * BLOCK_BYTES);
    return padded;
}

// Numbers of four rows -> of each number the four, `to[position[i]]` being that of 16 rows; r: the first of the four.
INLINE void place_rows(float (*to)[ROWS_OF_TILE], int r, const float* const rows[4], int count,
                       const uint8_t* position) {
    for (int i = 0; i < count; i += 4) {
        f32x4 square[4];
        for (int j = 0; j < 4; ++j) memcpy(&square[j], rows[j] + i, sizeof square[j]);
        transpose4(square);
        for (int j = 0; j < 4; ++j) memcpy(&to[position ? position[i + j] : i + j][r], &square[j], sizeof square[j]);
    }
}

#ifdef GROUPS  // of codes; plain formats have none
#ifdef RAW
INLINE unpacked unpack(const uint8_t* blocks) {
    unpacked found;
    u8x64 bytes[RAW];
    bytes_of(bytes, blocks), codes_of(found.codes, bytes), scales_of(&found, blocks);
    return found;
}

// Vectors of bytes of which codes_of makes codes; scale and minimum.
INLINE void load_row(u8x64 bytes[RAW], unpacked* found, const uint8_t* blocks) {
    bytes_of(bytes, blocks), scales_of(found, blocks);
}
#else
#define RAW 4
INLINE void codes_of(u8x64 codes[4], const u8x64 bytes[4]) {
    codes[0] = bytes[0], codes[1] = bytes[1], codes[2] = bytes[2], codes[3] = bytes[3];
}

INLINE void load_row(u8x64 bytes[4], unpacked* found, const uint8_t* blocks) {
    *found = unpack(blocks);
    codes_of(bytes, found->codes);
}
#endif

// ---- words of four codes, group by group

#define WORDS_OF_GROUP (SUPER / 4 / GROUPS)

typedef struct {
    uint8_t at[64];  // where word i of the vectors of codes lies among those of its group, and of the groups before
} word_order;

INLINE word_order order_of_words(void) {
    word_order found;
    int count[GROUPS] = {0};
    for (int i = 0; i < 64; ++i) {
        const int group = WEIGHT_OF(i / 16, 4 * (i % 16)) * GROUPS / SUPER;
        found.at[i] = (uint8_t)(group * WORDS_OF_GROUP + count[group]++);
    }
    return found;
}

#ifndef RUN  // slots of a run, whose weights follow each other and belong to one group
#define RUN 16
#endif

// 256 bytes of x in the order of the slots.
INLINE void order_by_slots(int8_t* to, const int8_t* from) {
    for (int slot = 0; slot < SUPER; slot += RUN) memcpy(to + slot, from + WEIGHT_OF(slot / 64, slot % 64), RUN);
}

// 256 numbers of x of so many bytes in the order of words of codes.
INLINE void order_by_words(void* to, const void* from, int size, const word_order* words) {
    for (int slot = 0; slot < SUPER; slot += RUN)
        memcpy((char*)to + size * (4 * words->at[slot / 4] + slot % 4),
               (const char*)from + size * WEIGHT_OF(slot / 64, slot % 64), size * RUN);
}

// 16 rows of 256 weights, a row a lane.
typedef struct {
    u8x64 codes[64];
    f32x16 scale[GROUPS], minimum[GROUPS];
} tile;

static void unpack_tile(tile* to, const product* p, int64_t row, int rows, int64_t i, const word_order* words) {
    uint8_t padded[ROWS_OF_TILE][SUPER_BYTES];
    const uint8_t* blocks[ROWS_OF_TILE];
    u8x64 bytes[ROWS_OF_TILE][RAW];
    for (int r = 0; r < ROWS_OF_TILE; ++r) {
        blocks[r] = super_of(p, row + (r < rows ? r : rows - 1), i, padded[r]);
        for (int ahead = 0; ahead < SUPER_BYTES; ahead += 64) __builtin_prefetch(blocks[r] + SUPER_BYTES + ahead);
    }
#ifdef SCALES_OF_TILE
    for (int r = 0; r < ROWS_OF_TILE; ++r) bytes_of(bytes[r], blocks[r]);
    scales_of_tile(to->scale, to->minimum, blocks);
#else
    u8x64 scale[ROWS_OF_TILE], minimum[ROWS_OF_TILE];
    for (int r = 0; r < ROWS_OF_TILE; ++r) {
        unpacked found;
        load_row(bytes[r], &found, blocks[r]);
        memcpy(&scale[r], &found.scale, sizeof scale[r]);
        if (MINIMUM) memcpy(&minimum[r], &found.minimum, sizeof minimum[r]);
    }
    transpose16(scale, 1), memcpy(to->scale, scale, sizeof to->scale);
    if (MINIMUM) transpose16(minimum, 1), memcpy(to->minimum, minimum, sizeof to->minimum);
#endif
    for (int j = 0; j < RAW; ++j) transpose16(&bytes[0][j], RAW);
    for (int word = 0; word < 16; ++word) {
        u8x64 codes[4];
        codes_of(codes, bytes[word]);
        to->codes[words->at[word]] = codes[0], to->codes[words->at[16 + word]] = codes[1];
        to->codes[words->at[32 + word]] = codes[2], to->codes[words->at[48 + word]] = codes[3];
    }
}
#endif
