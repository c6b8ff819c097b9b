// Packs 256 numbers of x for rows.h, in the order of the slots. Included once for each value of DIGITS.
//
// d      the scale of x for each lane's group
// s      its sum times the zero point (ZERO_FROM_SUM), or the sum of each group where the format has minimums
// q      the int8 digits
// zero   -INTEGER_ZERO times the integer sums: [0] of the first digit, [1] of 2^8 q1 + q2; with one digit and
//        LEAST_CODES, which have no zero, x_has_least instead of the first

#define STRUCT_(kind, digits) kind##_##digits
#define STRUCT(kind, digits) STRUCT_(kind, digits)

typedef struct {
    float d[SUM_LANES], s[SUM_LANES];
    int8_t q[DIGITS][SUPER];
    int32_t zero[2][SUM_LANES];
} STRUCT(packed, DIGITS);

static void STRUCT(pack, DIGITS)(STRUCT(packed, DIGITS) * to, const quantized_x* from) {
    i32x16 sums[DIGITS][ACCS];
    memset(to, 0, sizeof *to);
    for (int lane = 0; lane < SUM_LANES; ++lane) {
        to->d[lane] = from->d[LANE_GROUP[lane] * 8 / GROUPS];
        if (ZERO_FROM_SUM(DIGITS)) to->s[lane] = -(float)ZERO * from->s[LANE_GROUP[lane]];
    }
    if (MINIMUM) memcpy(to->s, from->s, sizeof from->s);
    for (int digit = 0; digit < DIGITS; ++digit) {
        order_by_slots(to->q[digit], from->q[digit]);
        for (int acc = 0; acc < ACCS; ++acc) sums[digit][acc] = all_ints(0);
        for (int v = 0; v < 4; ++v) {
            const i8x64 q = load_codes(to->q[digit] + 64 * v);
            sums[digit][ACC_OF(v)] = dot(sums[digit][ACC_OF(v)], all_bytes(1), q);
        }
    }
#if defined(LEAST_CODES) && DIGITS == 1
    to->zero[0][0] = x_has_least(to->q[0]);
#endif
    if (!INTEGER_ZERO(DIGITS)) return;
    store_group_ints(to->zero[0], mul_group_ints(sum_groups(sums[0]), -INTEGER_ZERO(DIGITS)));
#if DIGITS == 3
    for (int acc = 0; acc < ACCS; ++acc) sums[1][acc] = add_ints(shift_ints(sums[1][acc], 8), sums[2][acc]);
    store_group_ints(to->zero[1], mul_group_ints(sum_groups(sums[1]), -INTEGER_ZERO(DIGITS)));
#endif
}

#if DIGITS == 3 && defined(INTERLEAVED_ROWS)
// Packs 256 numbers of x for rows_of_lanes.h, by interleaved weights: words and groups in order, as tiles have them.
static void pack_words_3(packed_3* to, const quantized_x* from, const word_order* words) {
    memset(to, 0, sizeof *to);
    for (int group = 0; group < GROUPS; ++group) to->d[group] = from->d[group * 8 / GROUPS];
    if (MINIMUM) memcpy(to->s, from->s, sizeof from->s);
    for (int digit = 0; digit < 3; ++digit) order_by_words(to->q[digit], from->q[digit], 1, words);
    for (int i = 0; INTEGER_ZERO(3) && i < SUPER; ++i) {
        const int group = i * GROUPS / SUPER;
        to->zero[0][group] -= INTEGER_ZERO(3) * from->q[0][i];
        to->zero[1][group] -= INTEGER_ZERO(3) * (256 * from->q[1][i] + from->q[2][i]);
    }
}
#endif

#undef STRUCT
#undef STRUCT_
