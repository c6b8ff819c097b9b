// y for TOKENS rows of x by rows of W decoded to floats; a row of W is decoded once for all of them. Included for each
// value of TOKENS.
//
// Each of two sums adds every second vector of 16 products, so that two chains of fma overlap; lanes are added once a
// row, in a fixed order. FLOAT_ROWS rows of W multiply DEPTH_SUPERS super-blocks of x in turn, which stay in the
// first-level cache meanwhile, where several whole rows of x would not.
#ifndef FLOAT_ROWS
#define FLOAT_ROWS 8
#define DEPTH_SUPERS 4
#endif

// Adds super-blocks `first` to `last` - 1 of a row of W.
INLINE void ROWS_NAME(add_supers)(f32x16 totals[TOKENS][2], const product* p, const float* const x[TOKENS], int64_t row,
                                  int64_t first, int64_t last, const levels* table) {
    uint8_t padded[SUPER_BYTES];
    f32x16 sums[TOKENS][2];
    memcpy(sums, totals, sizeof sums);
    for (int64_t i = first; i < last; ++i) {
        f32x16 w[16];
        decode_super(w, read_super(p, row, i, padded), table);
#pragma GCC unroll 16
        for (int j = 0; j < 16; ++j)
#pragma GCC unroll 4
            for (int t = 0; t < TOKENS; ++t)
                sums[t][j % 2] = mul_add(sums[t][j % 2], w[j], load_floats(x[t] + i * SUPER + 16 * j));
    }
    memcpy(totals, sums, sizeof sums);
}

static void ROWS_NAME(rows)(const product* p, int64_t token, int64_t first, int64_t last) {
    const int64_t supers = (p->k + SUPER - 1) / SUPER, depth = TOKENS > 1 ? DEPTH_SUPERS : supers;
    const levels table = load_levels(p);
    const float* x[TOKENS];
    for (int t = 0; t < TOKENS; ++t) x[t] = (const float*)((const char*)p->packed + (token + t) * p->packed_row);
    for (int64_t row = first; row < last; row += FLOAT_ROWS) {
        const int rows = last - row < FLOAT_ROWS ? (int)(last - row) : FLOAT_ROWS;
        f32x16 sums[FLOAT_ROWS][TOKENS][2];
        memset(sums, 0, sizeof sums);
        for (int64_t i = 0; i < supers; i += depth)
            for (int r = 0; r < rows; ++r)
                ROWS_NAME(add_supers)(sums[r], p, x, row + r, i, i + depth < supers ? i + depth : supers, &table);
        for (int r = 0; r < rows; ++r)
            for (int t = 0; t < TOKENS; ++t)
                ((float*)p->y)[(token + t) * p->y_row + row + r] =
                    (reduce_add(sums[r][t][0]) + reduce_add(sums[r][t][1])) * p->unit;
    }
}
