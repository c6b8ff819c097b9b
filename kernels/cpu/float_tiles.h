// "a16" for many rows of x: float products by panels of 16 rows of W, 256 columns each, one row a lane.
//
// A panel is decoded once for all rows of x. PANEL_TOKENS rows of x by PANELS panels stay in registers for DEPTH
// columns, with one broadcast of x for each column. The sum of DEPTH products is then added to the total, in the same
// order on every CPU. Six of an even number of rows at a time, on AVX2, leave none, two or four.

#pragma once

#include "blocks.h"
#include "row_panels.h"

enum { DEPTH = 128 };
#if PARTS == 1
enum { PANEL_TOKENS = 8 };
#elif PARTS == 2
enum { PANEL_TOKENS = 6 };
#else
enum { PANEL_TOKENS = 4 };
#endif
// Rows of x from which on the second-level cache does not hold them, so that the next ones are fetched ahead on AVX2:
// DEPTH numbers of a row end before the CPU's own prefetching starts.
enum { PREFETCHED_TOKENS = 64 };
_Static_assert(TOKENS_OF_TILE % (PARTS == 2 ? 2 : PANEL_TOKENS) == 0 && SUPER % DEPTH == 0, "tiles are whole");

typedef struct {
    f32x16 column[SUPER];
} panel;

// ---- weights

#ifdef TABLE
typedef struct {
    f32x16 low, high;
} levels;

INLINE levels load_levels(const product* p) {
    return (levels){load_floats(p->table), load_floats((const float*)p->table + 16)};
}

INLINE f32x16 decode_level(const levels* table, i32x16 number) {
    return CODE_PLANES > 4 ? permute_two_tables(table->low, table->high, number) : permute(table->low, number);
}
#else
typedef char levels;  // codes are integers, no table
INLINE levels load_levels(const product* p) { return (void)p, 0; }
INLINE f32x16 decode_level(const levels* table, i32x16 number) {
    (void)table;
    return add_floats(to_float(number), all_floats(-(SHIFT + ZERO)));
}
#endif

#ifdef PLAIN
static void decode_panel(panel* to, const product* p, int64_t row, int rows, int64_t i, const levels* table) {
    (void)table;
    for (int r = 0; r < TILE_ROWS; r += 4) {
        uint8_t padded[4][SUPER_BYTES];
        const uint8_t* blocks[4];
        for (int j = 0; j < 4; ++j) blocks[j] = read_super(p, row + (r + j < rows ? r + j : rows - 1), i, padded[j]);
        for (int part = 0; part < 16; ++part) {
            f32x16 w[4];
            for (int j = 0; j < 4; ++j) w[j] = sixteen_weights(blocks[j], part);
            place_rows((float (*)[TILE_ROWS]) & to->column[16 * part], r,
                       (const float* const[4]){(float*)&w[0], (float*)&w[1], (float*)&w[2], (float*)&w[3]}, 16, 0);
        }
    }
}

#else
static void decode_panel(panel* to, const product* p, int64_t row, int rows, int64_t i, const levels* table) {
    const word_order words = make_word_order();
    tile w;
    unpack_tile(&w, p, row, rows, i, &words);
    for (int group = 0; group < GROUPS; ++group)
        for (int word = group * GROUP_WORDS; word < (group + 1) * GROUP_WORDS; ++word)
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const f32x16 level = decode_level(table, byte_of_words(w.codes[word], j));
                to->column[4 * word + j] =
                    MINIMUM ? mul_add(w.minimum[group], level, w.scale[group]) : mul(level, w.scale[group]);
            }
}

#endif

// ---- x

INLINE int64_t packed_float_bytes(int64_t k) { return (k + SUPER - 1) / SUPER * SUPER * sizeof(float); }

// Copies super-block i of a row of x, with zeros after column k.
INLINE void copy_super(float* to, const float* x, int64_t i, int64_t k) {
    const int64_t count = k - i * SUPER < SUPER ? k - i * SUPER : SUPER;
    memcpy(to, x + i * SUPER, sizeof(float) * count);
    memset(to + count, 0, sizeof(float) * (SUPER - count));
}

#ifdef PLAIN
typedef char word_order;
INLINE word_order make_word_order(void) { return 0; }
#endif

// Packs a row of x: as it is for products row by row; for tiles by 256 columns of all rows, in the order of a panel's
// columns, which is the order of the words of codes.
INLINE void pack_for_panels(const packing* p, int64_t row, const float* x, const word_order* words) {
    (void)words;
    for (int64_t i = 0; i < (p->k + SUPER - 1) / SUPER; ++i) {
        float numbers[SUPER];
        float* to = p->tiles ? (float*)p->to + SUPER * (i * p->m + row) : (float*)(p->to + row * p->to_row) + SUPER * i;
#ifndef PLAIN
        if (p->tiles) {
            copy_super(numbers, x, i, p->k);
            order_by_words(to, numbers, sizeof(float), words);
            continue;
        }
#endif
        (void)numbers;
        copy_super(to, x, i, p->k);
    }
}

// ---- products

// Adds DEPTH columns of `tokens` rows of x.
INLINE void add_panel_tokens(const float* x, const panel w[PANELS], int depth, f32x16 (*sums)[PANELS], int prefetch,
                             const int tokens) {
    f32x16 dots[PANEL_TOKENS][PANELS];
#pragma GCC unroll 8
    for (int t = 0; t < tokens; ++t)
#pragma GCC unroll 2
        for (int v = 0; v < PANELS; ++v) dots[t][v] = (f32x16){{{0}}};
    if (PARTS == 2 && prefetch)
#pragma GCC unroll 8
        for (int t = tokens; t < 2 * tokens; ++t)
#pragma GCC unroll 8
            for (int k = depth; k < depth + DEPTH; k += 16) __builtin_prefetch(x + SUPER * t + k);
    for (int k = depth; k < depth + DEPTH; ++k) {
        f32x16 column[PANELS];
#pragma GCC unroll 2
        for (int v = 0; v < PANELS; ++v) column[v] = load_operand(&w[v].column[k]);
#pragma GCC unroll 8
        for (int t = 0; t < tokens; ++t) {
            const f32x16 number = all_floats(x[SUPER * t + k]);
#pragma GCC unroll 2
            for (int v = 0; v < PANELS; ++v) dots[t][v] = mul_add(dots[t][v], column[v], number);
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < tokens; ++t)
#pragma GCC unroll 2
        for (int v = 0; v < PANELS; ++v) sums[t][v] = add_floats(sums[t][v], dots[t][v]);
}

INLINE void add_float_tiles(const product* p, int64_t tokens, int64_t i, const panel w[PANELS],
                            f32x16 (*sums)[PANELS]) {
    const int columns = multiplied_columns(p, i), prefetch = tokens >= PREFETCHED_TOKENS;
    for (int depth = 0; depth < columns; depth += DEPTH) {
        const float* x = (const float*)p->packed + SUPER * i * p->m;
        int64_t token = 0;
        for (; token + PANEL_TOKENS <= tokens; token += PANEL_TOKENS)
            add_panel_tokens(x + SUPER * token, w, depth, sums + token, prefetch, PANEL_TOKENS);
        if (PARTS == 2 && tokens - token == 4) add_panel_tokens(x + SUPER * token, w, depth, sums + token, prefetch, 4);
        if (PARTS == 2 && tokens - token == 2) add_panel_tokens(x + SUPER * token, w, depth, sums + token, prefetch, 2);
    }
}

#define MULTIPLY_TILES float_tiles
#define TILE panel
#define TILE_SETUP const levels table = load_levels(p);
#define LOAD_TILE(to, row, rows, i) decode_panel(to, p, row, rows, i, &table)
#define ADD_TILES add_float_tiles
#include "tile_loop.h"
