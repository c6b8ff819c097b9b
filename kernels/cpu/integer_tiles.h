// "a8" for many rows of x: integer products by tiles of 16 rows of W, one row a lane.
//
// A tile of 256 columns is unpacked once for all rows of x. Its codes are words of four columns for 16 rows, sorted by
// group. Each word of x is broadcast and multiplied by the words of PANELS tiles. A lane is a row, so no sum crosses
// lanes.

// 256 numbers of x, sorted by group. s: the sum of a group, times the zero point where ZERO_FROM_SUM; start: the
// initial integer sum of a group, which subtracts INTEGER_ZERO from each code.
typedef struct {
    float d[16], s[16];
    int32_t start[16];
    int8_t q[SUPER];
} tile_x;

static void pack_tile(tile_x* to, const quantized_x* from, const word_order* words) {
    memset(to, 0, sizeof *to);
    for (int group = 0; group < GROUPS; ++group) to->d[group] = from->d[group * 8 / GROUPS];
    if (MINIMUM || ZERO)
        for (int group = 0; group < GROUPS; ++group)
            to->s[group] = (ZERO_FROM_SUM(1) ? -(float)ZERO : 1) * from->s[group];
    order_by_words(to->q, from->q[0], 1, words);
    if (!INTEGER_ZERO(1)) return;
    for (int group = 0; group < GROUPS; ++group) {
        int32_t sum = 0;
        for (int i = 0; i < SUPER / GROUPS; ++i) sum += from->q[0][SUPER / GROUPS * group + i];
        to->start[group] = -INTEGER_ZERO(1) * sum;
    }
}

// The levels of a codebook are signed bytes from -127 on: AVX2 multiplies these at twice the rate of 8-bit codes.
#if defined(LEVELS_PLUS_SHIFT) && CODE_BITS == 8 && defined(SIGNED_DOT)
#define SUMS_OF_WORDS
#define START(x, group) 0
#define LARGEST_LEVEL ((int)(GREATEST_LEVEL > -LEAST_LEVEL ? GREATEST_LEVEL : -LEAST_LEVEL))
_Static_assert(SHIFT == 128 && LARGEST_LEVEL < 128, "codes without their shift are levels");
enum { SUMMED_WORDS = LARGEST_LEVEL < 16 ? 8 : LARGEST_LEVEL < 32 ? 4 : LARGEST_LEVEL < 64 ? 2 : 1 };
INLINE i32x16 add_to_sums(i32x16 sums, u8x64 codes, i8x64 x) { return add_signed_dot(sums, xor_all(codes, SHIFT), x); }
#else
#define START(x, group) (INTEGER_ZERO(1) ? (x).start[group] : 0)
#ifdef SHORT_WORDS
#define SUMS_OF_WORDS
enum { SUMMED_WORDS = SHORT_WORDS };
INLINE i32x16 add_to_sums(i32x16 sums, u8x64 codes, i8x64 x) { return add_short_dot(sums, codes, x); }
#endif
#endif

// Adds the products of a group's codes.
INLINE void add_group(i32x16 dots[REGISTER_TOKENS][PANELS], const tile w[PANELS], const tile_x* x, int group) {
#ifdef SUMS_OF_WORDS
    enum { STEP = SUMMED_WORDS < GROUP_WORDS ? SUMMED_WORDS : GROUP_WORDS };
#pragma GCC unroll 8
    for (int first = 0; first < GROUP_WORDS; first += STEP) {
        i32x16 sums[REGISTER_TOKENS][PANELS];
        EACH_SUM sums[t][v] = all_ints(0);
#pragma GCC unroll 8
        for (int word = group * GROUP_WORDS + first; word < group * GROUP_WORDS + first + STEP; ++word)
            EACH_SUM sums[t][v] = add_to_sums(sums[t][v], w[v].codes[word], all_words(x[t].q + 4 * word));
        EACH_SUM dots[t][v] = add_shorts(dots[t][v], sums[t][v]);
    }
#else
#pragma GCC unroll 8
    for (int word = group * GROUP_WORDS; word < (group + 1) * GROUP_WORDS; ++word)
        EACH_SUM dots[t][v] = dot(dots[t][v], w[v].codes[word], all_words(x[t].q + 4 * word));
#endif
}

INLINE void add_integer_tiles(const product* p, int64_t i, const tile w[PANELS], f32x16 (*sums)[PANELS]) {
    for (int64_t token = 0; token < p->m; token += REGISTER_TOKENS) {
        const tile_x* x = (const tile_x*)p->packed + i * p->m + token;
        f32x16 totals[REGISTER_TOKENS][PANELS];
        EACH_SUM totals[t][v] = sums[token + t][v];
        for (int group = 0; group < GROUPS; ++group) {
            i32x16 dots[REGISTER_TOKENS][PANELS];
            EACH_SUM dots[t][v] = all_ints(START(x[t], group));
            add_group(dots, w, x, group);
            EACH_SUM {
                const f32x16 d = all_floats(x[t].d[group]), s = all_floats(x[t].s[group]);
                const f32x16 sum = to_float(dots[t][v]);
                const f32x16 scaled = ZERO_FROM_SUM(1) ? mul_add(s, sum, d) : mul(sum, d);
                totals[t][v] = mul_add(totals[t][v], w[v].scale[group], scaled);
                if (MINIMUM) totals[t][v] = mul_add(totals[t][v], w[v].minimum[group], s);
            }
        }
        EACH_SUM sums[token + t][v] = totals[t][v];
    }
}

#define MULTIPLY_TILES integer_tiles
#define TILE tile
#define TILE_SETUP const word_order words = make_word_order();
#define LOAD_TILE(to, row, rows, i) unpack_tile(to, p, row, rows, i, &words)
#define ADD_TILES add_integer_tiles
#include "tile_loop.h"
