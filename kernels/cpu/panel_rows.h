// Rows of W as panels of ROWS_OF_TILE, a row a lane, PANELS of them together; sums of many rows of x by them.
#pragma once

#include "calls.h"
#include "vec.h"

#define ROWS_OF_TILE 16
#define SUPER 256  // weights that are unpacked at a time

enum { PANELS = PARTS == 1 ? 2 : 1, TOKENS_OF_SUMS = PARTS == 1 ? 4 : 2 };  // whose integer sums stay in registers

#define EACH_SUM                                                     \
    _Pragma("GCC unroll 4") for (int t = 0; t < TOKENS_OF_SUMS; ++t) \
        _Pragma("GCC unroll 2") for (int v = 0; v < PANELS; ++v)

// Rows of W in panel v, of those that are left.
INLINE int rows_of_panel(int64_t left, int v) {
    left -= ROWS_OF_TILE * v;
    return left < 0 ? 0 : left < ROWS_OF_TILE ? (int)left : ROWS_OF_TILE;
}

// How many rows each of PANELS panels at w, of `size` bytes each, has of the `left` ones; those of none become zeros.
INLINE void rows_of_panels(int rows[PANELS], void* w, size_t size, int64_t left) {
    for (int v = 0; v < PANELS; ++v) {
        rows[v] = rows_of_panel(left, v);
        if (!rows[v]) memset((char*)w + size * v, 0, size);
    }
}

static void store_panels(const product* p, int64_t row, const int rows[PANELS], f32x16 (*sums)[PANELS]) {
    for (int64_t token = 0; token < p->m; ++token)
        for (int v = 0; v < PANELS; ++v) {
            float found[ROWS_OF_TILE];
            const f32x16 all = mul_all(sums[token][v], p->unit);
            memcpy(found, &all, sizeof found);
            memcpy(p->y + token * p->y_row + row + ROWS_OF_TILE * v, found, sizeof(float) * rows[v]);
        }
}
