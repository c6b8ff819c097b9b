// 256 numbers of x for lane_rows.h, in the order of the vectors of codes: included for each DIGITS of x.
//
// d: the scale of each lane's numbers, accumulator by accumulator, times what a code of the lane counts. s: what a
// lane's sum begins with, of a8 what takes ZERO and SHIFT away; with a minimum the sums of x instead. Each group's is
// in one lane of its block. zero: what takes them from the integer sums of the first digit, and of the two others
// together, where a lane has one accumulator; of several that would be more than a first-level cache holds beside x,
// and s has them.

#ifndef FACTOR_OF_LANE
#define FACTOR_OF_LANE(lane) 1
#endif
#ifndef ZERO_OF_SUMS
#define ZERO_OF_SUMS (ACCS == 1 ? INTEGER_ZERO(3) : 0)  // of three digits
#endif
#define STRUCT_(kind, digits) kind##_##digits
#define STRUCT(kind, digits) STRUCT_(kind, digits)

typedef struct {
    float d[ACCS][16], s[16];
    int8_t q[DIGITS][SUPER];
#if DIGITS == 3
    int32_t zero[2][16];
#endif
} STRUCT(packed, DIGITS);

static void STRUCT(pack, DIGITS)(STRUCT(packed, DIGITS) * to, const numbers* from) {
    int seen = 0;  // a bit a group
    memset(to, 0, sizeof *to);
    for (int digit = 0; digit < DIGITS; ++digit) order_by_slots(to->q[digit], from->q[digit]);
    for (int acc = 0; acc < ACCS; ++acc)
        for (int lane = 0; lane < 16; ++lane) {
            const int group = WEIGHT_OF(acc * 4 / ACCS, 4 * lane) / 32;
            to->d[acc][lane] = from->d[group] * FACTOR_OF_LANE(lane);
            if (seen >> group & 1) continue;
            seen |= 1 << group;
            float s = 0;
            if (MINIMUM)
                s = from->s[group];
            else if (TAKES_SUM(DIGITS))
                s = -(float)ZERO * from->s[group];
            else if (DIGITS == 1 && INTEGER_ZERO(1)) {
                int32_t sum = 0;
                for (int i = 0; i < 32; ++i) sum += from->q[0][32 * group + i];
                s = (float)(-INTEGER_ZERO(1) * sum) * from->d[group];
            }
            to->s[lane + acc] += s;
        }
#if DIGITS == 3
    for (int v = 0; v < 4; ++v) {
        i32x16 sums[DIGITS];
        for (int digit = 0; digit < DIGITS; ++digit)
            sums[digit] = dot(all_ints(0), all_bytes(1), load_codes(to->q[digit] + 64 * v));
        int32_t first[16], rest[16];
        store_ints(first, sums[0]), store_ints(rest, add_ints(shift_ints(sums[1], 8), sums[2]));
        for (int lane = 0; lane < 16; ++lane) {
            const int32_t zero = (int32_t)(INTEGER_ZERO(DIGITS) / FACTOR_OF_LANE(lane));
            if (ZERO_OF_SUMS)
                to->zero[0][lane] -= zero * first[lane], to->zero[1][lane] -= zero * rest[lane];
            else if (INTEGER_ZERO(DIGITS))
                to->s[lane] -=
                    (float)zero * to->d[ACC_OF(v)][lane] * (0x1p16f * (float)first[lane] + (float)rest[lane]);
        }
    }
#endif
}

#undef STRUCT
#undef STRUCT_
