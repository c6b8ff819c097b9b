// 256 numbers of x in the order in which codes meet them: included for each DIGITS of x.
//
// For rows.h, in the order of the vectors of codes. d: the scale of each lane's group; s: its sum, times the zero that
// it takes away (TAKES_SUM), else the sum of each group; zero: what takes it from the integer sums of the first digit,
// and of the two others together.

#define STRUCT_(kind, digits) kind##_##digits
#define STRUCT(kind, digits) STRUCT_(kind, digits)

typedef struct {
    float d[SUM_LANES], s[SUM_LANES];
    int8_t q[DIGITS][SUPER];
    int32_t zero[2][SUM_LANES];
} STRUCT(packed, DIGITS);

static void STRUCT(pack, DIGITS)(STRUCT(packed, DIGITS) * to, const numbers* from) {
    i32x16 sums[DIGITS][ACCS];
    memset(to, 0, sizeof *to);
    for (int lane = 0; lane < SUM_LANES; ++lane) {
        to->d[lane] = from->d[GROUP_OF_LANE[lane] * 8 / GROUPS];
        if (TAKES_SUM(DIGITS)) to->s[lane] = -(float)ZERO * from->s[GROUP_OF_LANE[lane]];
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
    if (!INTEGER_ZERO(DIGITS)) return;
    store_group_ints(to->zero[0], mul_group_ints(sums_of_groups(sums[0]), -INTEGER_ZERO(DIGITS)));
#if DIGITS == 3
    for (int acc = 0; acc < ACCS; ++acc) sums[1][acc] = add_ints(shift_ints(sums[1][acc], 8), sums[2][acc]);
    store_group_ints(to->zero[1], mul_group_ints(sums_of_groups(sums[1]), -INTEGER_ZERO(DIGITS)));
#endif
}

#undef STRUCT
#undef STRUCT_
