// TOKENS rows of x by interleaved weights, for LANE_DIGITS digits of x: 16 rows of W at a time, one row a lane. No sum
// crosses lanes.
//
// Codes go from the interleaved bytes to the products in registers. A group's words are LANES words of each vector of
// one accumulator; x has them side by side, as for tiles (integer_tiles.h).

#if LANE_DIGITS == 1
#define LANE_X tile_x
#define DIGIT_OF(x, digit) ((x)->q)
#define SIZE_OF(x) ((x)->size)
#define START_OF(x, digit, group) ((x)->start[group])
#else
#define LANE_X packed_3
#define DIGIT_OF(x, digit) ((x)->q[digit])
#define SIZE_OF(x) ((x)->q[0])
#define START_OF(x, digit, group) ((digit) == 1 ? 0 : (x)->zero[(digit) / 2][group])
#endif
#define EACH_DIGIT                                           \
    _Pragma("GCC unroll 4") for (int t = 0; t < TOKENS; ++t) \
        _Pragma("GCC unroll 3") for (int digit = 0; digit < LANE_DIGITS; ++digit)

// Adds the products of word `word` of a code vector of weights to the sums of the rows of x, whose word is `place`.
INLINE void ROWS_NAME(add_word)(i32x16 dots[TOKENS][LANE_DIGITS], i32x16 shorts[TOKENS][LANE_DIGITS],
                                const interleaved* w, const int vector, const int word, const LANE_X* x, int place,
                                const int least) {
    (void)dots, (void)shorts, (void)least;
#if SIGNED_CODES
    i8x64 levels[4];
    decode_levels(levels, w, word);
#else
    u8x64 codes[4];
    decode_word(codes, w, word);
#endif
    EACH_DIGIT {
        const i8x64 q = all_words(DIGIT_OF(&x[t], digit) + 4 * place);
#ifdef SHORT_WORDS
        shorts[t][digit] = settle(add_short_dot(shorts[t][digit], codes[vector], q));
#elif SIGNED_CODES
        const i8x64 size = LANE_DIGITS == 1 ? all_words(SIZE_OF(&x[t]) + 4 * place) : magnitudes(q);
        dots[t][digit] = settle(sized_dot(dots[t][digit], levels[vector], q, size, least));
#else
        dots[t][digit] = settle(dot(dots[t][digit], codes[vector], q));
#endif
    }
}

// total + the products of a group by 16 rows of W, from the integer sums of the digits of x.
INLINE f32x16 ROWS_NAME(add_digits)(f32x16 total, const i32x16 dots[LANE_DIGITS], const LANE_X* x, int group,
                                    f32x16 scale, f32x16 minimum) {
#if LANE_DIGITS == 1
    return add_scaled(total, dots[0], x, group, scale, minimum);
#else
    const f32x16 rest = to_float(add_ints(shift_ints(dots[1], 8), dots[2]));
    const f32x16 sum = mul_add(rest, to_float(dots[0]), all_floats(0x1p16f));
    total = mul_add(total, scale, mul(sum, all_floats(x->d[group])));
    return MINIMUM ? mul_add(total, minimum, all_floats(x->s[group])) : total;
#endif
}

// least: whether a level may be -128 (level_dot).
INLINE void ROWS_NAME(add_interleaved)(f32x16 totals[TOKENS], const interleaved* w, const LANE_X* x, const int least) {
    f32x16 scale[GROUPS], minimum[GROUPS];
    load_interleaved_scales(scale, minimum, w);
#pragma GCC unroll 16
    for (int group = 0; group < GROUPS; ++group) {
        const int run = run_of_group(group), vector = 4 / ACCS * (run / RUNS), first = LANES * (run % RUNS);
        i32x16 dots[TOKENS][LANE_DIGITS], shorts[TOKENS][LANE_DIGITS];
        EACH_DIGIT {
            dots[t][digit] = all_ints(INTEGER_ZERO(LANE_DIGITS) ? START_OF(&x[t], digit, group) : 0);
            shorts[t][digit] = all_ints(0);
        }
#pragma GCC unroll 8
        for (int i = 0; i < GROUP_WORDS; ++i) {
            ROWS_NAME(add_word)(dots, shorts, w, vector + i / LANES, first + i % LANES, x, group * GROUP_WORDS + i,
                                least);
#ifdef SHORT_WORDS
            if (i + 1 < GROUP_WORDS && (i + 1) % SHORT_WORDS) continue;
            EACH_DIGIT {
                dots[t][digit] = add_shorts(dots[t][digit], shorts[t][digit]);
                shorts[t][digit] = all_ints(0);
            }
#endif
        }
#pragma GCC unroll 4
        for (int t = 0; t < TOKENS; ++t)
            totals[t] = ROWS_NAME(add_digits)(totals[t], dots[t], &x[t], group, scale[group], minimum[group]);
    }
}

#if SIGNED_CODES && defined(LEAST_CODES)
static __attribute__((noinline, cold)) void ROWS_NAME(add_least_interleaved)(f32x16 totals[TOKENS],
                                                                             const interleaved* w, const LANE_X* x) {
    ROWS_NAME(add_interleaved)(totals, w, x, 1);
}
#endif

static void ROWS_NAME(rows)(const product* p, int64_t token, int64_t first, int64_t last) {
    const int64_t supers = (p->k + SUPER - 1) / SUPER;
    for (int64_t row = first; row < last; row += TILE_ROWS) {
        const interleaved* w = interleaved_rows(p, row);
        f32x16 totals[TOKENS];
        for (int t = 0; t < TOKENS; ++t) totals[t] = all_floats(0);
        for (int64_t i = 0; i < supers; ++i) {
            const LANE_X* x = (const LANE_X*)p->packed + i * p->m + token;
            prefetch_tile(w + i + 2);
#if SIGNED_CODES && defined(LEAST_CODES)
            if (__builtin_expect(w[i].least, 0)) {
                ROWS_NAME(add_least_interleaved)(totals, w + i, x);
                continue;
            }
#endif
            ROWS_NAME(add_interleaved)(totals, w + i, x, 0);
        }
        const int64_t rows = last - row < TILE_ROWS ? last - row : TILE_ROWS;
        for (int t = 0; t < TOKENS; ++t) {
            float values[TILE_ROWS];
            store_floats(values, mul_all(totals[t], p->unit));
            memcpy(p->y + (token + t) * p->y_row + row, values, sizeof(float) * rows);
        }
    }
}

#undef LANE_X
#undef DIGIT_OF
#undef SIZE_OF
#undef START_OF
#undef EACH_DIGIT
