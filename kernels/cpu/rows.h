// TOKENS rows of x by rows of W, each row unpacked once: included for each number of tokens and DIGITS of x.
//
// y = sum over groups of scale * (d * dot(codes, q) - ZERO * s) + minimum * s, with d and s, scale and sum of the group's
// x. The dot product of a group is an exact integer; a lane adds those of one group in every 256 weights, and lanes meet once a row,
// in a fixed order. scale * d would leave the range of float32 where y does not.

#define NAME_(digits, tokens) rows_##digits##_##tokens
#define NAME__(digits, tokens) NAME_(digits, tokens)
#define X PACKED(DIGITS)

static void NAME__(DIGITS, TOKENS)(const product* p, int64_t token, int64_t first, int64_t last) {
    const int64_t supers = (p->k + SUPER - 1) / SUPER;
    const X* x[TOKENS];
    for (int t = 0; t < TOKENS; ++t) x[t] = (const X*)((const char*)p->packed + (token + t) * p->packed_row);
    for (int64_t row = first; row < last; ++row) {
        uint8_t padded[SUPER_BYTES];
        group_floats sums[TOKENS], minimums[TOKENS];
        for (int t = 0; t < TOKENS; ++t) sums[t] = minimums[t] = all_group_floats(0);
        for (int64_t i = 0; i < supers; ++i) {
            const unpacked w = unpack(super_of(p, row, i, padded));
            const group_floats scale = spread_groups(w.scale, load_group_ints(GROUP_OF_LANE));
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; ++t) {
                const X* at = x[t] + i;
                if (MINIMUM) minimums[t] = mul_add_groups(minimums[t], of_groups(w.minimum), load_group_floats(at->s));
                i32x16 dots[DIGITS][ACCS];
#pragma GCC unroll 3
                for (int digit = 0; digit < DIGITS; ++digit)
#pragma GCC unroll 4
                    for (int acc = 0; acc < ACCS; ++acc) {
                        i32x16 sum = {{{0}}};
                        if (digit == 2) sum = shift_ints(dots[1][acc], 8);  // 256 times the digit before
#pragma GCC unroll 4
                        for (int v = 0; v < 4; ++v)
                            if (ACC_OF(v) == acc) {
                                const i8x64 q = load_codes(at->q[digit] + 64 * v);
                                sum = DIGITS == 1 ? DOT_OF_ONE(sum, w.codes[v], q) : dot(sum, w.codes[v], q);
                            }
                        dots[digit][acc] = sum;
                    }
                const group_floats of_codes = TOGETHER(DIGITS)(dots, at->zero), d = load_group_floats(at->d);
                const group_floats found =
                    TAKES_SUM(DIGITS) ? mul_add_groups(load_group_floats(at->s), of_codes, d) : mul_groups(of_codes, d);
                sums[t] = mul_add_groups(sums[t], scale, found);
            }
        }
        for (int t = 0; t < TOKENS; ++t)
            ((float*)p->y)[(token + t) * p->y_row + row] = (sum_of_all(sums[t]) + sum_of_all(minimums[t])) * p->unit;
    }
}

#undef X
#undef NAME_
#undef NAME__
