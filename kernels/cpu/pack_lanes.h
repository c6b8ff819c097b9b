// Packs 256 numbers of x for lane_rows.h, in the order of the slots. Included once for each value of DIGITS.
//
// d      the scale of x for each accumulator and lane, times LANE_FACTOR
// s      the initial value of a lane's sum: with one digit it subtracts ZERO and SHIFT; where the format has minimums,
//        the sum of x instead. One lane of a block has the value of each group.
// q      the int8 digits
// zero   -INTEGER_ZERO times the integer sums: [0] of the first digit, [1] of 2^8 q1 + q2 (LANE_ZERO)
//
// Three digits use `zero` only with a single accumulator. With more, x and zero together would exceed the L1 cache, and
// s subtracts the zero point in float.

#ifndef LANE_FACTOR
#define LANE_FACTOR(lane) 1
#endif
#ifndef LANE_ZERO
#define LANE_ZERO (ACCS == 1 ? INTEGER_ZERO(3) : 0)  // for three digits
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

static void STRUCT(pack, DIGITS)(STRUCT(packed, DIGITS) * to, const quantized_x* from) {
    int stored_groups = 0;  // one bit for each group
    memset(to, 0, sizeof *to);
    for (int digit = 0; digit < DIGITS; ++digit) order_by_slots(to->q[digit], from->q[digit]);
    for (int acc = 0; acc < ACCS; ++acc)
        for (int lane = 0; lane < 16; ++lane) {
            const int group = WEIGHT_OF(acc * 4 / ACCS, 4 * lane) / 32;
            to->d[acc][lane] = from->d[group] * LANE_FACTOR(lane);
            if (stored_groups >> group & 1) continue;
            stored_groups |= 1 << group;
            float s = 0;
            if (MINIMUM)
                s = from->s[group];
            else if (ZERO_FROM_SUM(DIGITS))
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
            const int32_t zero = (int32_t)(INTEGER_ZERO(DIGITS) / LANE_FACTOR(lane));
            if (LANE_ZERO)
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
