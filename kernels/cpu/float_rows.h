// y for TOKENS rows of x by rows of W decoded to floats; a row of W is decoded once for all of them. Included for each
// value of TOKENS.
//
// Each of two sums adds every second vector of 16 products, so that two chains of fma overlap; lanes are added once a
// row, in a fixed order.

static void ROWS_NAME(rows)(const product* p, int64_t token, int64_t first, int64_t last) {
    const int64_t supers = (p->k + SUPER - 1) / SUPER;
    const levels table = load_levels(p);
    const float* x[TOKENS];
    for (int t = 0; t < TOKENS; ++t) x[t] = (const float*)((const char*)p->packed + (token + t) * p->packed_row);
    for (int64_t row = first; row < last; ++row) {
        uint8_t padded[SUPER_BYTES];
        f32x16 sums[TOKENS][2];
        for (int t = 0; t < TOKENS; ++t) sums[t][0] = sums[t][1] = (f32x16){{{0}}};
        for (int64_t i = 0; i < supers; ++i) {
            f32x16 w[16];
            decode_super(w, read_super(p, row, i, padded), &table);
#pragma GCC unroll 16
            for (int j = 0; j < 16; ++j)
#pragma GCC unroll 4
                for (int t = 0; t < TOKENS; ++t)
                    sums[t][j % 2] = mul_add(sums[t][j % 2], w[j], load_floats(x[t] + i * SUPER + 16 * j));
        }
        for (int t = 0; t < TOKENS; ++t)
            ((float*)p->y)[(token + t) * p->y_row + row] = (reduce_add(sums[t][0]) + reduce_add(sums[t][1])) * p->unit;
    }
}
