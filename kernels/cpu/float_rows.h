// TOKENS rows of x by rows of W, each row decoded once: included for each number of tokens.
//
// A lane adds every 16th product of 256 columns in each of two sums; lanes meet once a row, in a fixed order.

#define NAME_(tokens) float_rows_##tokens
#define NAME__(tokens) NAME_(tokens)

static void NAME__(TOKENS)(const product* p, int64_t token, int64_t first, int64_t last) {
    const int64_t supers = (p->k + SUPER - 1) / SUPER;
    const levels table = levels_of(p);
    const float* x[TOKENS];
    for (int t = 0; t < TOKENS; ++t) x[t] = (const float*)((const char*)p->packed + (token + t) * p->packed_row);
    for (int64_t row = first; row < last; ++row) {
        uint8_t padded[SUPER_BYTES];
        f32x16 sums[TOKENS][2];
        for (int t = 0; t < TOKENS; ++t) sums[t][0] = sums[t][1] = (f32x16){{{0}}};
        for (int64_t i = 0; i < supers; ++i) {
            f32x16 w[16];
            weights_of(w, super_of(p, row, i, padded), &table);
#pragma GCC unroll 16
            for (int j = 0; j < 16; ++j)
#pragma GCC unroll 4
                for (int t = 0; t < TOKENS; ++t)
                    sums[t][j % 2] = mul_add(sums[t][j % 2], w[j], load_floats(x[t] + i * SUPER + 16 * j));
        }
        for (int t = 0; t < TOKENS; ++t)
            ((float*)p->y)[(token + t) * p->y_row + row] = (sum_of(sums[t][0]) + sum_of(sums[t][1])) * p->unit;
    }
}

#undef NAME_
#undef NAME__
