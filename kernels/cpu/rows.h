// TOKENS rows of x by rows of W, each row unpacked once: included for each number of tokens and DIGITS of x.
//
// y = sum over groups of scale * (d * dot(codes, q) - ZERO * s) + minimum * s, with d and s, scale and sum of the
// group's x. The dot product of a group is an exact integer; a lane adds those of one group in every 256 weights. scale
// * d would leave the range of float32 where y does not.

#define SUMS group_floats
#define NO_SUMS all_group_floats(0)
#define TOTAL sum_of_all

INLINE void ROWS_NAME(add_super)(SUMS* sums, SUMS* minimums, const X* const* x, int64_t i, const uint8_t* blocks) {
    const unpacked w = unpack(blocks);
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

#include "row_sums.h"
