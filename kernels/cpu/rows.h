// Adds 256 products to the sums of TOKENS rows of x; a row of W is unpacked once for all of them. Included for each
// DIGITS and TOKENS.
//
// y = sum over groups of scale * (d * dot(codes, q) - ZERO * s) + minimum * s, where d is the scale and s the sum of x
// in the group. A lane holds one group of every 256 weights, as an exact integer. The product scale * d is never
// formed: it could leave the range of float32 where y does not.

#define SUMS group_floats
#define NO_SUMS all_group_floats(0)
#define REDUCE reduce_add_groups

// d * dot(codes, q) - ZERO * s of each group, by its lane.
INLINE group_floats ROWS_NAME(group_products)(const X* x, const u8x64 codes[4], const int least) {
    i32x16 dots[DIGITS][ACCS];
#pragma GCC unroll 3
    for (int digit = 0; digit < DIGITS; ++digit)
#pragma GCC unroll 4
        for (int acc = 0; acc < ACCS; ++acc) {
            i32x16 sum = {{{0}}};
            if (digit == 2) sum = shift_ints(dots[1][acc], 8);  // the second digit counts 2^8
            dots[digit][acc] = CODE_DOTS(DIGITS)(sum, codes, x->q[digit], acc, least);
        }
    const group_floats sum = COMBINE_DIGITS(DIGITS)(dots, x->zero), d = load_group_floats(x->d);
    return ZERO_FROM_SUM(DIGITS) ? mul_add_groups(load_group_floats(x->s), sum, d) : mul_groups(sum, d);
}

// least: whether a number of x, or with three digits a level, may be -128.
INLINE void ROWS_NAME(add_unpacked)(SUMS* sums, SUMS* minimums, const X* const* x, int64_t i, const unpacked w,
                                    const int least) {
    const group_floats scale = permute_groups(w.scale, load_group_ints(LANE_GROUP));
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; ++t) {
        const X* xi = x[t] + i;
        if (MINIMUM) minimums[t] = mul_add_groups(minimums[t], to_group_floats(w.minimum), load_group_floats(xi->s));
        sums[t] = mul_add_groups(sums[t], scale, ROWS_NAME(group_products)(xi, w.codes, least));
    }
}

#ifdef LEAST_CODES
// Out of line, so that its values do not occupy registers of the loop.
static __attribute__((noinline, cold)) void ROWS_NAME(add_least)(SUMS* sums, SUMS* minimums, const X* const* x,
                                                                 int64_t i, const uint8_t* blocks) {
    ROWS_NAME(add_unpacked)(sums, minimums, x, i, unpack(blocks), 1);
}
#endif

INLINE void ROWS_NAME(add_super)(SUMS* sums, SUMS* minimums, const X* const* x, int64_t i, const uint8_t* blocks) {
    const unpacked w = unpack(blocks);
#ifdef LEAST_CODES
    int least = DIGITS == 3 && codes_have_least(w.codes);
    for (int t = 0; DIGITS == 1 && t < TOKENS; ++t) least |= x[t][i].zero[0][0];
    if (__builtin_expect(least, 0)) {
        ROWS_NAME(add_least)(sums, minimums, x, i, blocks);
        return;
    }
#endif
    ROWS_NAME(add_unpacked)(sums, minimums, x, i, w, 0);
}

#include "row_loop.h"
#if TOKENS == 1 && defined(SPANNING)
#include "spanning_rows.h"
#endif
