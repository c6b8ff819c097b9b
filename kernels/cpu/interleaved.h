// Tiles of 16 rows by 256 columns of W, one row a lane: as the bytes of the file, interleaved, and as codes.
//
// An interleaved tile has the vectors of raw_to_codes, transposed as 16 x 16 words, and the scales of each row beside
// those of the others. Products make it from the blocks of a file, or read it from memory where qgemm_interleave has
// made it once for many products.
//
// Macro that a format's header may define: SCALE_SHORTS, the number of pairs of bytes that encode the scales and
// minimums in 256 weights. copy_scales(to, blocks) copies these pairs; load_tile_scales(scale, minimum, fields) makes
// scales and minimums of 16 rows from interleaved pairs. Tiles of other formats hold scales and minimums as floats.
#pragma once

#include "signed_codes.h"

typedef struct {
    u8x64 raw[RAW][16];
#ifdef SCALE_SHORTS
    uint16_t fields[SCALE_SHORTS][TILE_ROWS] __attribute__((aligned(64)));
#else
    f32x16 scale[GROUPS], minimum[MINIMUM ? GROUPS : 1];
#endif
#if SIGNED_CODES && defined(LEAST_CODES)
    int32_t least __attribute__((aligned(64)));  // whether any of the codes is the level -128
#endif
} interleaved;

// Codes of 16 rows of 256 weights: lane r of each vector belongs to row r, and codes[i] is word i of each row.
typedef struct {
    u8x64 codes[64];
    f32x16 scale[GROUPS], minimum[GROUPS];
} tile;

INLINE void store_row(interleaved* to, int row, const u8x64 bytes[RAW]) {
#pragma GCC unroll 4
    for (int j = 0; j < RAW; ++j) EACH_PART to->raw[j][row].part[i] = bytes[j].part[i];
}

// The codes of word `word` of each code vector.
INLINE void decode_word(u8x64 codes[4], const interleaved* from, int word) {
    u8x64 bytes[RAW];
#pragma GCC unroll 4
    for (int j = 0; j < RAW; ++j) bytes[j] = load64(&from->raw[j][word]);
    raw_to_codes(codes, bytes);
}

#if SIGNED_CODES
// decode_word as signed levels; a codebook is looked up without a shift.
INLINE void decode_levels(i8x64 levels[4], const interleaved* from, int word) {
    u8x64 codes[4];
#ifdef LEVELS
    const u8x64 bytes[RAW] = {load64(&from->raw[0][word]), load64(&from->raw[1][word])};
    lookup_shifted(codes, bytes, 0);
    for (int v = 0; v < 4; ++v) EACH_PART levels[v].part[i] = (i8_part)codes[v].part[i];
#else
    decode_word(codes, from, word);
    for (int v = 0; v < 4; ++v) levels[v] = levels_of(codes[v]);
#endif
}
#endif

// Interleaves super-block i of `rows` rows from `row` on; the last row fills the lanes of those that lack.
static void interleave(interleaved* to, const product* p, int64_t row, int rows, int64_t i) {
    uint8_t padded[TILE_ROWS][SUPER_BYTES];
    const uint8_t* blocks[TILE_ROWS];
    for (int r = 0; r < TILE_ROWS; ++r) {
        blocks[r] = read_super(p, row + (r < rows ? r : rows - 1), i, padded[r]);
        for (int ahead = 0; ahead < SUPER_BYTES; ahead += 64) __builtin_prefetch(blocks[r] + SUPER_BYTES + ahead);
    }
#ifdef SCALE_SHORTS
    for (int r = 0; r < TILE_ROWS; ++r) {
        uint16_t fields[SCALE_SHORTS];
        u8x64 bytes[RAW];
        load_raw(bytes, blocks[r]), copy_scales(fields, blocks[r]);
        store_row(to, r, bytes);
#pragma GCC unroll 16
        for (int j = 0; j < SCALE_SHORTS; ++j) to->fields[j][r] = fields[j];
    }
#else
    u8x64 scale[TILE_ROWS], minimum[TILE_ROWS];
    for (int r = 0; r < TILE_ROWS; ++r) {
        unpacked w;
        u8x64 bytes[RAW];
        load_raw_row(bytes, &w, blocks[r]);
        store_row(to, r, bytes);
        memcpy(&scale[r], &w.scale, sizeof scale[r]);
        if (MINIMUM) memcpy(&minimum[r], &w.minimum, sizeof minimum[r]);
    }
    transpose16(scale, 1), memcpy(to->scale, scale, sizeof to->scale);
    if (MINIMUM) transpose16(minimum, 1), memcpy(to->minimum, minimum, sizeof to->minimum);
#endif
    for (int j = 0; j < RAW; ++j) transpose16(to->raw[j], 1);
#if SIGNED_CODES && defined(LEAST_CODES)
    to->least = 0;
    for (int word = 0; word < 16; ++word) {
        u8x64 codes[4];
        decode_word(codes, to, word);
        to->least |= codes_have_least(codes);
    }
#endif
}

// The interleaved tiles of 16 rows of W from `row` on.
INLINE const interleaved* interleaved_rows(const product* p, int64_t row) {
    return (const interleaved*)((const char*)p->w + row * p->w_row);
}

// From DRAM products by one row of x need 1.5 times as long without it. `tile` may lie beyond the last one.
INLINE void prefetch_tile(const interleaved* tile) {
    for (int byte = 0; byte < (int)sizeof *tile; byte += 64) __builtin_prefetch((const char*)tile + byte);
}

INLINE void load_interleaved_scales(f32x16 scale[GROUPS], f32x16 minimum[GROUPS], const interleaved* from) {
#ifdef SCALE_SHORTS
    load_tile_scales(scale, minimum, from->fields);
#else
#pragma GCC unroll 16
    for (int group = 0; group < GROUPS; ++group) {
        scale[group] = load_floats(&from->scale[group]);
        if (MINIMUM) minimum[group] = load_floats(&from->minimum[group]);
    }
#endif
}

static void unpack_tile(tile* to, const product* p, int64_t row, int rows, int64_t i, const word_order* words) {
    interleaved made;
    const interleaved* from = &made;
    if (p->interleaved)
        from = interleaved_rows(p, row) + i, prefetch_tile(from + 1);
    else
        interleave(&made, p, row, rows, i);
    load_interleaved_scales(to->scale, to->minimum, from);
    for (int word = 0; word < 16; ++word) {
        u8x64 codes[4];
        decode_word(codes, from, word);
        to->codes[words->position[word]] = codes[0], to->codes[words->position[16 + word]] = codes[1];
        to->codes[words->position[32 + word]] = codes[2], to->codes[words->position[48 + word]] = codes[3];
    }
}

#ifdef INTERLEAVED_ROWS
// Bytes of W [n, k], interleaved, from one run of 16 rows to the next, for each of its rows.
int64_t qgemm_interleaved_bytes(int64_t k) {
    return (k + SUPER - 1) / SUPER * (int64_t)sizeof(interleaved) / TILE_ROWS;
}

// Interleaves runs first to last - 1 of 16 rows of W: one thread's share.
void qgemm_interleave(const void* argument, int64_t first, int64_t last) {
    const interleaving* job = argument;
    const product weights = {.w = job->w, .w_row = job->w_row, .k = job->k};
    const int64_t supers = (job->k + SUPER - 1) / SUPER;
    const uint64_t mode = enter_ieee_mode();
    for (int64_t run = first; run < last; ++run)
        for (int64_t i = 0; i < supers; ++i) {
            const int64_t row = TILE_ROWS * run, left = job->n - row;
            interleave((interleaved*)job->to + run * supers + i, &weights, row,
                       left < TILE_ROWS ? (int)left : TILE_ROWS, i);
        }
    restore_mode(mode);
}
#endif
