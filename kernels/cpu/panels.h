// Many rows of x by panels of W decoded to floats: 256 columns of 16 rows each, a row a lane.
//
// A panel is decoded once for all rows of x; then TOKENS rows of x by PANELS panels stay in registers for DEPTH
// columns, a broadcast of x for each. Sums of DEPTH products are added to those before: the order is the same whatever
// the CPU.

#pragma once

#include "blocks.h"
#include "panel_rows.h"

enum { DEPTH = 128, TOKENS_AT_ONCE = PARTS == 1 ? 8 : 4 };
_Static_assert(TOKENS_OF_TILE % TOKENS_AT_ONCE == 0 && SUPER % DEPTH == 0, "tiles are whole");

typedef struct {
    f32x16 column[SUPER];
} panel;

// ---- weights

#ifdef TABLE
typedef struct {
    f32x16 low, high;
} levels;

INLINE levels levels_of(const product* p) {
    return (levels){load_floats(p->table), load_floats((const float*)p->table + 16)};
}

INLINE f32x16 level_of(const levels* table, i32x16 number) {
    return CODE_PLANES > 4 ? spread_of_two(table->low, table->high, number) : spread(table->low, number);
}
#else
typedef char levels;  // codes are numbers
INLINE levels levels_of(const product* p) { return (void)p, 0; }
INLINE f32x16 level_of(const levels* table, i32x16 number) {
    (void)table;
    return add_floats(to_float(number), all_floats(-(SHIFT + ZERO)));
}
#endif

#ifdef PLAIN
static void decode_panel(panel* to, const product* p, int64_t row, int rows, int64_t i, const levels* table) {
    (void)table;
    for (int r = 0; r < ROWS_OF_TILE; r += 4) {
        uint8_t padded[4][SUPER_BYTES];
        const uint8_t* blocks[4];
        for (int j = 0; j < 4; ++j) blocks[j] = super_of(p, row + (r + j < rows ? r + j : rows - 1), i, padded[j]);
        for (int part = 0; part < 16; ++part) {
            f32x16 w[4];
            for (int j = 0; j < 4; ++j) w[j] = sixteen(blocks[j], part);
            place_rows((float (*)[ROWS_OF_TILE]) & to->column[16 * part], r,
                       (const float* const[4]){(float*)&w[0], (float*)&w[1], (float*)&w[2], (float*)&w[3]}, 16, 0);
        }
    }
}

#else
static void decode_panel(panel* to, const product* p, int64_t row, int rows, int64_t i, const levels* table) {
    const word_order words = order_of_words();
    tile w;
    unpack_tile(&w, p, row, rows, i, &words);
    for (int group = 0; group < GROUPS; ++group)
        for (int word = group * WORDS_OF_GROUP; word < (group + 1) * WORDS_OF_GROUP; ++word)
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const f32x16 level = level_of(table, byte_of_words(w.codes[word], j));
                to->column[4 * word + j] =
                    MINIMUM ? mul_add(w.minimum[group], level, w.scale[group]) : mul(level, w.scale[group]);
            }
}

#endif

// ---- x

INLINE int64_t bytes_of_floats(int64_t k) { return (k + SUPER - 1) / SUPER * SUPER * sizeof(float); }

// Columns 256 i on of a row of x, with zeros behind the last.
INLINE void copy_super(float* to, const float* x, int64_t i, int64_t k) {
    const int64_t count = k - i * SUPER < SUPER ? k - i * SUPER : SUPER;
    memcpy(to, x + i * SUPER, sizeof(float) * count);
    memset(to + count, 0, sizeof(float) * (SUPER - count));
}

#ifdef PLAIN
typedef char word_order;
INLINE word_order order_of_words(void) { return 0; }
#endif

// A row of x: for rows of W as it is, for panels by 256 columns of all rows, in the order of the columns of a panel,
// which is that of words of codes.
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

static void float_tiles(const product* p, int64_t first, int64_t last) {
    const int64_t supers = (p->k + SUPER - 1) / SUPER;
    const levels table = levels_of(p);
    panel w[PANELS];
    f32x16 sums[MOST_TOKENS][PANELS];
    for (int64_t row = first; row < last; row += ROWS_OF_TILE * PANELS) {
        int rows[PANELS];  // of each panel
        rows_of_panels(rows, w, sizeof w[0], last - row);
        memset(sums, 0, sizeof sums[0] * p->m);
        for (int64_t i = 0; i < supers; ++i) {
            for (int v = 0; v < PANELS; ++v)
                if (rows[v]) decode_panel(&w[v], p, row + ROWS_OF_TILE * v, rows[v], i, &table);
            for (int depth = 0; depth < SUPER; depth += DEPTH)
                for (int64_t token = 0; token < p->m; token += TOKENS_AT_ONCE) {
                    const float* x = (const float*)p->packed + SUPER * (i * p->m + token);
                    f32x16 dots[TOKENS_AT_ONCE][PANELS];
#pragma GCC unroll 8
                    for (int t = 0; t < TOKENS_AT_ONCE; ++t)
#pragma GCC unroll 2
                        for (int v = 0; v < PANELS; ++v) dots[t][v] = (f32x16){{{0}}};
                    for (int k = depth; k < depth + DEPTH; ++k)
#pragma GCC unroll 8
                        for (int t = 0; t < TOKENS_AT_ONCE; ++t) {
                            const f32x16 number = all_floats(x[SUPER * t + k]);
#pragma GCC unroll 2
                            for (int v = 0; v < PANELS; ++v) dots[t][v] = mul_add(dots[t][v], w[v].column[k], number);
                        }
#pragma GCC unroll 8
                    for (int t = 0; t < TOKENS_AT_ONCE; ++t)
#pragma GCC unroll 2
                        for (int v = 0; v < PANELS; ++v)
                            sums[token + t][v] = add_floats(sums[token + t][v], dots[t][v]);
                }
        }
        store_panels(p, row, rows, sums);
    }
}
