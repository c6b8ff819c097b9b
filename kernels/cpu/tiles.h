// "a8" of many rows of x by tiles of 16 rows of W, a row a lane.
//
// A tile of 256 columns is unpacked once for all rows of x. Its codes lie as words of four, 16 rows side by side, the
// words of a group one after the other; a word of x meets them by a broadcast, those of PANELS tiles by one. Sums need
// no shuffle: a lane is a row.

// 256 numbers of x, group by group. s: the sum of a group, times the zero that it takes away (TAKES_SUM); start: what
// takes it from the integer sum.
typedef struct {
    float d[16], s[16];
    int32_t start[16];
    int8_t q[SUPER];
} tiled;

static void tile_numbers(tiled* to, const numbers* from, const word_order* words) {
    memset(to, 0, sizeof *to);
    for (int group = 0; group < GROUPS; ++group) to->d[group] = from->d[group * 8 / GROUPS];
    if (MINIMUM || ZERO)
        for (int group = 0; group < GROUPS; ++group) to->s[group] = (TAKES_SUM(1) ? -(float)ZERO : 1) * from->s[group];
    order_by_words(to->q, from->q[0], 1, words);
    if (!INTEGER_ZERO(1)) return;
    for (int group = 0; group < GROUPS; ++group) {
        int32_t sum = 0;
        for (int i = 0; i < SUPER / GROUPS; ++i) sum += from->q[0][SUPER / GROUPS * group + i];
        to->start[group] = -INTEGER_ZERO(1) * sum;
    }
}

static void integer_tiles(const product* p, int64_t first, int64_t last) {
    const int64_t supers = (p->k + SUPER - 1) / SUPER;
    const word_order words = order_of_words();
    tile w[PANELS];
    f32x16 sums[MOST_TOKENS][PANELS];
    for (int64_t row = first; row < last; row += ROWS_OF_TILE * PANELS) {
        int rows[PANELS];  // of each tile
        rows_of_panels(rows, w, sizeof w[0], last - row);
        memset(sums, 0, sizeof sums[0] * p->m);
        for (int64_t i = 0; i < supers; ++i) {
            for (int v = 0; v < PANELS; ++v)
                if (rows[v]) unpack_tile(&w[v], p, row + ROWS_OF_TILE * v, rows[v], i, &words);
            for (int64_t token = 0; token < p->m; token += TOKENS_OF_SUMS) {
                const tiled* x = (const tiled*)p->packed + i * p->m + token;
                f32x16 totals[TOKENS_OF_SUMS][PANELS];
                EACH_SUM totals[t][v] = sums[token + t][v];
                for (int group = 0; group < GROUPS; ++group) {
                    i32x16 dots[TOKENS_OF_SUMS][PANELS];
                    EACH_SUM dots[t][v] = all_ints(INTEGER_ZERO(1) ? x[t].start[group] : 0);
#pragma GCC unroll 8
                    for (int j = 0; j < WORDS_OF_GROUP; ++j) {
                        const int word = group * WORDS_OF_GROUP + j;
                        EACH_SUM dots[t][v] = dot(dots[t][v], w[v].codes[word], all_words(x[t].q + 4 * word));
                    }
                    EACH_SUM {
                        const f32x16 d = all_floats(x[t].d[group]), s = all_floats(x[t].s[group]);
                        const f32x16 sum = to_float(dots[t][v]);
                        const f32x16 found = TAKES_SUM(1) ? mul_add(s, sum, d) : mul(sum, d);
                        totals[t][v] = mul_add(totals[t][v], w[v].scale[group], found);
                        if (MINIMUM) totals[t][v] = mul_add(totals[t][v], w[v].minimum[group], s);
                    }
                }
                EACH_SUM sums[token + t][v] = totals[t][v];
            }
        }
        store_panels(p, row, rows, sums);
    }
}
