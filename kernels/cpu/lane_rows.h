// TOKENS rows of x by rows of W whose lanes keep their block from vector to vector (SCALES_OF_LANES): included for each
// number of tokens and DIGITS of x.
//
// y = sum over lanes of scale * sum over accumulators of d * dot(codes, q). Integer sums of a lane become floats
// without meeting those of other lanes, which takes shuffles; lanes meet once a row, in a fixed order.

#define SUMS f32x16
#define NO_SUMS all_floats(0)
#define TOTAL sum_of

INLINE void ROWS_NAME(add_super)(SUMS* sums, SUMS* minimums, const X* const* x, int64_t i, const uint8_t* blocks) {
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
                    if (ACC_OF(v) == acc) dots[digit] = dot(dots[digit], w.codes[v], load_codes(at->q[digit] + 64 * v));
            }
            f32x16 sum = to_float(dots[DIGITS - 1]);
            if (DIGITS == 3) sum = mul_add(sum, to_float(dots[0]), all_floats(0x1p16f));
            found = mul_add(found, sum, load_floats(at->d[acc]));
        }
        sums[t] = mul_add(sums[t], found, scale);
    }
}

#include "row_sums.h"
