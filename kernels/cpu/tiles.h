// "a8" of many rows of x by tiles of 16 rows of W, a row a lane.
//
// A tile of 256 columns is unpacked once for all rows of x. Its codes lie as words of four, 16 rows side by side, the
// words of a group one after the other; a word of x meets them by a broadcast. Sums need no shuffle: a lane is a row.

// 256 numbers of x, group by group. start: what takes the zero from the sum of a group.
typedef struct {
    float d[16], s[16];
    int32_t start[16];
    int8_t q[SUPER];
} tiled;

static void tile_numbers(tiled* to, const numbers* from, const word_order* words) {
    memset(to, 0, sizeof *to);
    for (int group = 0; group < GROUPS; ++group) to->d[group] = from->d[group * 8 / GROUPS];
    memcpy(to->s, from->s, sizeof from->s);
    for (int v = 0; v < 4; ++v)
        for (int i = 0; i < 64; ++i) {
            const int word = words->at[16 * v + i / 4];
            const int8_t q = from->q[0][WEIGHT_OF(v, i)];
            to->q[4 * word + i % 4] = q;
            to->start[word / WORDS_OF_GROUP] -= INTEGER_ZERO(1) * q;
        }
}

static void integer_tiles(const product* p, int64_t first, int64_t last) {
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
            for (; token + TOKENS_OF_TILE <= p->m; token += TOKENS_OF_TILE) {
                const tiled* x[TOKENS_OF_TILE];
                f32x16 total[TOKENS_OF_TILE];
#pragma GCC unroll 8
                for (int t = 0; t < TOKENS_OF_TILE; ++t) {
                    x[t] = (const tiled*)((const char*)p->packed + (token + t) * p->packed_row) + i;
                    total[t] = sums[token + t];
                }
                for (int group = 0; group < GROUPS; ++group) {
                    i32x16 dots[TOKENS_OF_TILE];
#pragma GCC unroll 8
                    for (int t = 0; t < TOKENS_OF_TILE; ++t) dots[t] = all_ints(x[t]->start[group]);
                    for (int word = group * WORDS_OF_GROUP; word < (group + 1) * WORDS_OF_GROUP; ++word) {
                        const u8x64 codes = w.codes[word];
#pragma GCC unroll 8
                        for (int t = 0; t < TOKENS_OF_TILE; ++t)
                            dots[t] = dot(dots[t], codes, all_words(x[t]->q + 4 * word));
                    }
#pragma GCC unroll 8
                    for (int t = 0; t < TOKENS_OF_TILE; ++t) {
                        total[t] = mul_add(total[t], w.scale[group], mul_all(to_float(dots[t]), x[t]->d[group]));
                        if (HAS_MINIMUM(1)) total[t] = mul_add(total[t], w.minimum[group], all_floats(x[t]->s[group]));
                    }
                }
#pragma GCC unroll 8
                for (int t = 0; t < TOKENS_OF_TILE; ++t) sums[token + t] = total[t];
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
