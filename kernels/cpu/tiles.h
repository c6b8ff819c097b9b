// Many rows of x by tiles of 16 rows of W, a row a lane: included for each DIGITS of x.
//
// A tile of 256 columns is unpacked once for all rows of x. Its codes lie as words of four, 16 rows side by side, the
// words of a group one after the other; a word of x meets them by a broadcast. Sums need no shuffle: a lane is a row.

#define NAME_(digits) tiles_##digits
#define NAME__(digits) NAME_(digits)
#define X TILED(DIGITS)

static void NAME__(DIGITS)(const product* p, int64_t first, int64_t last) {
    const int64_t supers = (p->k + SUPER - 1) / SUPER;
    const word_order words = order_of_words();
    tile w;
    f32x16 sums[MOST_TOKENS];
    for (int64_t row = first; row < last; row += ROWS_OF_TILE) {
        const int rows = last - row < ROWS_OF_TILE ? (int)(last - row) : ROWS_OF_TILE;
        memset(sums, 0, sizeof(f32x16) * p->m);
        for (int64_t i = 0; i < supers; ++i) {
            unpack_tile(&w, p, row, rows, i, &words);
            int64_t token = 0;
            for (; token + TOKENS <= p->m; token += TOKENS) {
                const X* x[TOKENS];
                f32x16 total[TOKENS];
#pragma GCC unroll 8
                for (int t = 0; t < TOKENS; ++t) {
                    x[t] = (const X*)((const char*)p->packed + (token + t) * p->packed_row) + i;
                    total[t] = sums[token + t];
                }
                for (int group = 0; group < GROUPS; ++group) {
                    i32x16 dots[TOKENS][DIGITS];
#pragma GCC unroll 8
                    for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 3
                        for (int digit = 0; digit < DIGITS; ++digit)
                            dots[t][digit] = all_ints(x[t]->start[digit][group]);
                    for (int word = group * WORDS_OF_GROUP; word < (group + 1) * WORDS_OF_GROUP; ++word) {
                        const u8x64 codes = w.codes[word];
#pragma GCC unroll 8
                        for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 3
                            for (int digit = 0; digit < DIGITS; ++digit)
                                dots[t][digit] = dot(dots[t][digit], codes, all_words(x[t]->q[digit] + 4 * word));
                    }
#pragma GCC unroll 8
                    for (int t = 0; t < TOKENS; ++t) {
                        total[t] = mul_add(total[t], w.scale[group],
                                           mul_all(DIGITS_TOGETHER(DIGITS)(dots[t]), x[t]->d[group]));
                        if (HAS_MINIMUM(DIGITS))
                            total[t] = mul_add(total[t], w.minimum[group], all_floats(x[t]->s[group]));
                    }
                }
#pragma GCC unroll 8
                for (int t = 0; t < TOKENS; ++t) sums[token + t] = total[t];
            }
        }
        for (int64_t token = 0; token < p->m; ++token) {
            float found[ROWS_OF_TILE];
            const f32x16 all = mul_all(sums[token], p->unit);
            memcpy(found, &all, sizeof found);
            memcpy((float*)p->y + token * p->y_row + row, found, sizeof(float) * rows);
        }
    }
}

#undef X
#undef NAME_
#undef NAME__
