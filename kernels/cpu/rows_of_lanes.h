// "a8" for TOKENS rows of x by interleaved weights: 16 rows of W at a time, one row a lane. No sum crosses lanes.
//
// Codes go from the interleaved bytes to the products in registers. A group's words are LANES words of each vector of
// one accumulator; x has them side by side, as for tiles (integer_tiles.h).

// Adds the products of word `word` of a code vector of weights to the sums of the rows of x, whose word is `place`.
INLINE void ROWS_NAME(add_word)(i32x16 dots[TOKENS], i32x16 shorts[TOKENS], const interleaved* w, const int vector,
                                const int word, const tile_x* x, int place, const int least) {
    u8x64 codes[4];
    decode_word(codes, w, word);
    (void)dots, (void)shorts, (void)least;
#pragma GCC unroll 4
    for (int t = 0; t < TOKENS; ++t) {
        const i8x64 q = all_words(x[t].q + 4 * place);
#ifdef SHORT_WORDS
        shorts[t] = settle(add_short_dot(shorts[t], codes[vector], q));
#else
        dots[t] = settle(TILE_DOT(dots[t], codes[vector], q, least));
#endif
    }
}

INLINE void ROWS_NAME(add_interleaved)(f32x16 totals[TOKENS], const interleaved* w, const tile_x* x, const int least) {
    f32x16 scale[GROUPS], minimum[GROUPS];
    load_interleaved_scales(scale, minimum, w);
#pragma GCC unroll 16
    for (int group = 0; group < GROUPS; ++group) {
        const int run = run_of_group(group), vector = 4 / ACCS * (run / RUNS), first = LANES * (run % RUNS);
        i32x16 dots[TOKENS], shorts[TOKENS];
#pragma GCC unroll 4
        for (int t = 0; t < TOKENS; ++t)
            dots[t] = all_ints(INTEGER_ZERO(1) ? x[t].start[group] : 0), shorts[t] = all_ints(0);
#pragma GCC unroll 8
        for (int i = 0; i < GROUP_WORDS; ++i) {
            ROWS_NAME(add_word)(dots, shorts, w, vector + i / LANES, first + i % LANES, x, group * GROUP_WORDS + i,
                                least);
#ifdef SHORT_WORDS
            if (i + 1 < GROUP_WORDS && (i + 1) % SHORT_WORDS) continue;
#pragma GCC unroll 4
            for (int t = 0; t < TOKENS; ++t) dots[t] = add_shorts(dots[t], shorts[t]), shorts[t] = all_ints(0);
#endif
        }
#pragma GCC unroll 4
        for (int t = 0; t < TOKENS; ++t)
            totals[t] = add_scaled(totals[t], dots[t], &x[t], group, scale[group], minimum[group]);
    }
}

#if SIGNED_CODES
static __attribute__((noinline, cold)) void ROWS_NAME(add_least_interleaved)(f32x16 totals[TOKENS],
                                                                             const interleaved* w, const tile_x* x) {
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
            const tile_x* x = (const tile_x*)p->packed + i * p->m + token;
            prefetch_tile(w + i + 2);
#if SIGNED_CODES
            int least = 0;
            for (int t = 0; t < TOKENS; ++t) least |= x[t].least;
            if (__builtin_expect(least, 0)) {
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
