// "a8" for many rows of x: integer products by tiles of 16 rows of W, one row a lane.
//
// A tile of 256 columns is unpacked once for all rows of x. Its codes are words of four columns for 16 rows, sorted by
// group. Each word of x is broadcast and multiplied by the words of PANELS tiles. A lane is a row, so no sum crosses
// lanes.

// 256 numbers of x, sorted by group. s: the sum of a group, times the zero point where ZERO_FROM_SUM; start: the
// initial integer sum of a group, which subtracts INTEGER_ZERO from each code; least: x_has_least, for signed codes.
typedef struct {
    float d[GROUPS], s[GROUPS];
    int32_t start[GROUPS], least;
    int8_t q[SUPER];
#if SIGNED_CODES
    int8_t size[SUPER];  // |q|, as unsigned bytes
#endif
} tile_x;

static void pack_tile(tile_x* to, const quantized_x* from, const word_order* words) {
    memset(to, 0, sizeof *to);
    for (int group = 0; group < GROUPS; ++group) to->d[group] = from->d[group * 8 / GROUPS];
    if (MINIMUM || ZERO)
        for (int group = 0; group < GROUPS; ++group)
            to->s[group] = (ZERO_FROM_SUM(1) ? -(float)ZERO : 1) * from->s[group];
    order_by_words(to->q, from->q[0], 1, words);
#if SIGNED_CODES
    to->least = x_has_least(to->q);
    for (int i = 0; i < SUPER; ++i) to->size[i] = (int8_t)(to->q[i] < 0 ? -to->q[i] : to->q[i]);
#endif
    if (!INTEGER_ZERO(1)) return;
    for (int group = 0; group < GROUPS; ++group) {
        int32_t sum = 0;
        for (int i = 0; i < SUPER / GROUPS; ++i) sum += from->q[0][SUPER / GROUPS * group + i];
        to->start[group] = -INTEGER_ZERO(1) * sum;
    }
}

#if SIGNED_CODES
#define TILE_DOT x_dot
#else
#define TILE_DOT(sum, codes, q, least) dot(sum, codes, q)
#endif

// Adds the products of a group's codes. least: whether a number of x may be -128.
INLINE void add_group(i32x16 dots[REGISTER_TOKENS][PANELS], const tile w[PANELS], const tile_x* x, int group,
                      const int least) {
    (void)least;
#ifdef SHORT_WORDS
    enum { STEP = SHORT_WORDS < GROUP_WORDS ? SHORT_WORDS : GROUP_WORDS };
#pragma GCC unroll 8
    for (int first = 0; first < GROUP_WORDS; first += STEP) {
        i32x16 sums[REGISTER_TOKENS][PANELS];
        EACH_SUM sums[t][v] = all_ints(0);
#pragma GCC unroll 8
        for (int word = group * GROUP_WORDS + first; word < group * GROUP_WORDS + first + STEP; ++word) EACH_SUM {
                sums[t][v] = add_short_dot(sums[t][v], w[v].codes[word], all_words(x[t].q + 4 * word));
                sums[t][v] = settle(sums[t][v]);
            }
        EACH_SUM dots[t][v] = add_shorts(dots[t][v], sums[t][v]);
    }
#else
#pragma GCC unroll 8
    for (int word = group * GROUP_WORDS; word < (group + 1) * GROUP_WORDS; ++word) EACH_SUM {
            dots[t][v] = settle(TILE_DOT(dots[t][v], w[v].codes[word], all_words(x[t].q + 4 * word), least));
        }
#endif
}

// total + the products of a group of one row of x by 16 rows of W, from their integer sums.
INLINE f32x16 add_scaled(f32x16 total, i32x16 dots, const tile_x* x, int group, f32x16 scale, f32x16 minimum) {
    const f32x16 d = all_floats(x->d[group]), s = all_floats(x->s[group]), sum = to_float(dots);
    total = mul_add(total, scale, ZERO_FROM_SUM(1) ? mul_add(s, sum, d) : mul(sum, d));
    return MINIMUM ? mul_add(total, minimum, s) : total;
}

// Adds the products of REGISTER_TOKENS rows of x.
INLINE void add_tokens(const tile_x* x, const tile w[PANELS], int groups, f32x16 (*sums)[PANELS], const int least) {
    f32x16 totals[REGISTER_TOKENS][PANELS];
    EACH_SUM totals[t][v] = sums[t][v];
    for (int group = 0; group < groups; ++group) {
        i32x16 dots[REGISTER_TOKENS][PANELS];
        EACH_SUM dots[t][v] = all_ints(INTEGER_ZERO(1) ? x[t].start[group] : 0);
        add_group(dots, w, x, group, least);
        EACH_SUM totals[t][v] =
            add_scaled(totals[t][v], dots[t][v], &x[t], group, w[v].scale[group], w[v].minimum[group]);
    }
    EACH_SUM sums[t][v] = totals[t][v];
}

#if SIGNED_CODES
static __attribute__((noinline, cold)) void add_least_tokens(const tile_x* x, const tile w[PANELS], int groups,
                                                             f32x16 (*sums)[PANELS]) {
    add_tokens(x, w, groups, sums, 1);
}
#endif

INLINE void add_integer_tiles(const product* p, int64_t tokens, int64_t i, const tile w[PANELS],
                              f32x16 (*sums)[PANELS]) {
    const int groups = (multiplied_columns(p, i) * GROUPS + SUPER - 1) / SUPER;
    for (int64_t token = 0; token < tokens; token += REGISTER_TOKENS) {
        const tile_x* x = (const tile_x*)p->packed + i * p->m + token;
#if SIGNED_CODES
        int least = 0;
        for (int t = 0; t < REGISTER_TOKENS; ++t) least |= x[t].least;
        if (__builtin_expect(least, 0)) {
            add_least_tokens(x, w, groups, sums + token);
            continue;
        }
#endif
        add_tokens(x, w, groups, sums + token, 0);
    }
}

#define MULTIPLY_TILES integer_tiles
#define TILE tile
#define TILE_SETUP const word_order words = make_word_order();
#define LOAD_TILE(to, row, rows, i) unpack_tile(to, p, row, rows, i, &words)
#define ADD_TILES add_integer_tiles
#include "tile_loop.h"
