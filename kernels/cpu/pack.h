// 256 numbers of x in the order in which codes meet them: included for each DIGITS of x.
//
// packed: for rows.h, in the order of the vectors of codes. d: the scale of each lane's group; init: what takes the zero
// from the sums of each lane.

#define STRUCT_(kind, digits) kind##_##digits
#define STRUCT(kind, digits) STRUCT_(kind, digits)

typedef struct {
    float d[16], s[16];
    int8_t q[DIGITS][SUPER];
    int32_t init[HAS_INIT(DIGITS) ? DIGITS : 0][ACCS][16];
} STRUCT(packed, DIGITS);

static void STRUCT(pack, DIGITS)(STRUCT(packed, DIGITS) * to, const numbers* from) {
    memset(to, 0, sizeof *to);
    for (int lane = 0; lane < 16; ++lane)
        if (GROUPS == 16 || GROUP_OF_LANE[lane] != NONE) to->d[lane] = from->d[GROUP_OF_LANE[lane] * 8 / GROUPS];
    memcpy(to->s, from->s, sizeof from->s);
    for (int digit = 0; digit < DIGITS; ++digit)
        for (int v = 0; v < 4; ++v)
            for (int i = 0; i < 64; ++i) {
                const int8_t q = from->q[digit][WEIGHT_OF(v, i)];
                to->q[digit][64 * v + i] = q;
                if (HAS_INIT(DIGITS)) to->init[digit][ACC_OF(v)][i / 4] -= INTEGER_ZERO(DIGITS) * q;
            }
}

#undef STRUCT
#undef STRUCT_
