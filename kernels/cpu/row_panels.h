// Panels of 16 rows of W, one row a lane; PANELS of them are multiplied together by REGISTER_TOKENS rows of x.
#pragma once

#include "calls.h"
#include "vec.h"

#define TILE_ROWS 16
#define SUPER 256  // weights unpacked at a time

enum { PANELS = PARTS == 1 ? 2 : 1, REGISTER_TOKENS = PARTS == 4 ? 2 : 4 };  // integer sums in registers

#define EACH_SUM                                                      \
    _Pragma("GCC unroll 4") for (int t = 0; t < REGISTER_TOKENS; ++t) \
        _Pragma("GCC unroll 2") for (int v = 0; v < PANELS; ++v)

// The number of rows in panel v, if `left` rows of W remain.
INLINE int count_panel_rows(int64_t left, int v) {
    left -= TILE_ROWS * v;
    return left < 0 ? 0 : left < TILE_ROWS ? (int)left : TILE_ROWS;
}

// Counts the rows of each of PANELS panels, if `left` rows of W remain, and zeroes the empty panels (`size` bytes each,
// at w).
INLINE void count_rows(int rows[PANELS], void* w, size_t size, int64_t left) {
    for (int v = 0; v < PANELS; ++v) {
        rows[v] = count_panel_rows(left, v);
        if (!rows[v]) memset((char*)w + size * v, 0, size);
    }
}

static void store_panels(const product* p, int64_t tokens, int64_t row, const int rows[PANELS],
                         f32x16 (*sums)[PANELS]) {
    for (int64_t token = 0; token < tokens; ++token)
        for (int v = 0; v < PANELS; ++v) {
            float values[TILE_ROWS];
            const f32x16 scaled = mul_all(sums[token][v], p->unit);
            memcpy(values, &scaled, sizeof values);
            memcpy(p->y + token * p->y_row + row + TILE_ROWS * v, values, sizeof(float) * rows[v]);
        }
}
