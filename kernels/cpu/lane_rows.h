// TOKENS rows of x by rows of W whose lanes keep their block from vector to vector (SCALES_OF_LANES): included for each
// number of tokens and DIGITS of x.
//
// y = sum over lanes of scale * sum over accumulators of d * dot(codes, q). Integer sums of a lane become floats without
// meeting those of other lanes, which takes shuffles; lanes meet once a row, in a fixed order.

#define NAME_(digits, tokens) rows_##digits##_##tokens
#define NAME__(digits, tokens) NAME_(digits, tokens)
#define X PACKED(DIGITS)

static void NAME__(DIGITS, TOKENS)(const product* p, int64_t token, int64_t first, int64_t last) {
    const int64_t supers = (p->k + SUPER - 1) / SUPER;
    const X* x[TOKENS];
    for (int t = 0; t < TOKENS; ++t) x[t] = (const X*)((const char*)p->packed + (token + t) * p->packed_row);
    for (int64_t row = first; row < last; ++row) {
        uint8_t padded[SUPER_BYTES];
        f32x16 sums[TOKENS], minimums[TOKENS];
        for (int t = 0; t < TOKENS; ++t) sums[t] = minimums[t] = all_floats(0);
        for (int64_t i = 0; i < supers; ++i) {
            const uint8_t* blocks = super_of(p, row, i, padded);
#ifdef CODES_OF_LANES
            unpacked w;
            codes_by_lanes(w.codes, blocks);
#else
            const unpacked w = unpack(blocks);
#endif
            f32x16 scale, minimum;
            scales_of_lanes(&scale, &minimum, blocks);
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; ++t) {
                const X* at = x[t] + i;
                if (MINIMUM) minimums[t] = mul_add(minimums[t], minimum, load_floats(at->s));
                f32x16 found = MINIMUM ? all_floats(0) : load_floats(at->s);
#pragma GCC unroll 4
                for (int acc = 0; acc < ACCS; ++acc) {
                    i32x16 dots[DIGITS];
#pragma GCC unroll 3
                    for (int digit = 0; digit < DIGITS; ++digit) {
                        dots[digit] = all_ints(0);
#if DIGITS == 3
                        if (ZERO_OF_SUMS && digit == 0) dots[0] = load_ints(at->zero[0]);
                        if (digit == 2) {  // 256 times the digit before
                            dots[2] = shift_ints(dots[1], 8);
                            if (ZERO_OF_SUMS) dots[2] = add_ints(dots[2], load_ints(at->zero[1]));
                        }
#endif
#pragma GCC unroll 4
                        for (int v = 0; v < 4; ++v)
                            if (ACC_OF(v) == acc)
                                dots[digit] = dot(dots[digit], w.codes[v], load_codes(at->q[digit] + 64 * v));
                    }
                    f32x16 sum = to_float(dots[DIGITS - 1]);
                    if (DIGITS == 3) sum = mul_add(sum, to_float(dots[0]), all_floats(0x1p16f));
                    found = mul_add(found, sum, load_floats(at->d[acc]));
                }
                sums[t] = mul_add(sums[t], found, scale);
            }
        }
        for (int t = 0; t < TOKENS; ++t)
            ((float*)p->y)[(token + t) * p->y_row + row] = (sum_of(sums[t]) + sum_of(minimums[t])) * p->unit;
    }
}

#undef X
#undef NAME_
#undef NAME__
