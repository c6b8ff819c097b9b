// Adds 256 products to the sums of TOKENS rows of x, for formats with LANE_SCALES. Included for each DIGITS and TOKENS.
//
// y = sum over lanes of scale * sum over accumulators of d * dot(codes, q). The integer sum of a lane becomes a float
// at once, without shuffles; lanes are added once a row, in a fixed order.

#define SUMS f32x16
#define NO_SUMS all_floats(0)
#define REDUCE reduce_add

INLINE void ROWS_NAME(add_super)(SUMS* sums, SUMS* minimums, const X* const* x, int64_t i, const uint8_t* blocks) {
#ifdef LANE_CODES
    unpacked w;
    load_lane_codes(w.codes, blocks);
#else
    const unpacked w = unpack(blocks);
#endif
    f32x16 scale, minimum;
    load_lane_scales(&scale, &minimum, blocks);
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; ++t) {
        const X* xi = x[t] + i;
        if (MINIMUM) minimums[t] = mul_add(minimums[t], minimum, load_floats(xi->s));
        f32x16 total = MINIMUM ? all_floats(0) : load_floats(xi->s);
#pragma GCC unroll 4
        for (int acc = 0; acc < ACCS; ++acc) {
            i32x16 dots[DIGITS];
#pragma GCC unroll 3
            for (int digit = 0; digit < DIGITS; ++digit) {
                dots[digit] = all_ints(0);
#if DIGITS == 3
                if (LANE_ZERO && digit == 0) dots[0] = load_ints(xi->zero[0]);
                if (digit == 2) {  // the second digit counts 2^8
                    dots[2] = shift_ints(dots[1], 8);
                    if (LANE_ZERO) dots[2] = add_ints(dots[2], load_ints(xi->zero[1]));
                }
#endif
#pragma GCC unroll 4
                for (int v = 0; v < 4; ++v)
                    if (ACC_OF(v) == acc) dots[digit] = dot(dots[digit], w.codes[v], load_codes(xi->q[digit] + 64 * v));
            }
            f32x16 sum = to_float(dots[DIGITS - 1]);
            if (DIGITS == 3) sum = mul_add(sum, to_float(dots[0]), all_floats(0x1p16f));
            total = mul_add(total, sum, load_floats(xi->d[acc]));
        }
        sums[t] = mul_add(sums[t], total, scale);
    }
}

#include "row_loop.h"
