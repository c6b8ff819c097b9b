// y [m, n] = x [m, k] @ W [n, k].T of one format whose codes are integers, from the blocks of a file.
//
// Macros besides those of blocks.h: of a codebook LEVELS_PLUS_SHIFT; ACTIVATION_BYTES, a block's of activations;
// LEAST_LEVEL, GREATEST_LEVEL of a code, LEAST_EIGHT_BITS (to_eight_bits.h).
#include "blocks.h"
// Whether integer sums of lanes become floats before they meet, for one digit of x and for three, or first are those of
// groups: LOW_GROUP besides SCALES_OF_LANES asks for both, where there is a zero.
#ifdef SCALES_OF_LANES
#define PACK_1 "lane_pack.h"
#define ROWS_1 "lane_rows.h"
#else
#define PACK_1 "pack.h"
#define ROWS_1 "rows.h"
#endif
#if defined(SCALES_OF_LANES) && (!defined(LOW_GROUP) || SHIFT + ZERO == 0)
#define PACK_3 "lane_pack.h"
#define ROWS_3 "lane_rows.h"
#else
#include "groups.h"
#define PACK_3 "pack.h"
#define ROWS_3 "rows.h"
#endif
#include "panels.h"

// a8 takes the zero from the rounded sum of x, as ggml's formula does; a16 from the digits, which is exact.
#define TAKES_SUM(digits) (ZERO && (digits) == 1)
#define INTEGER_ZERO(digits) ((digits) == 1 ? SHIFT : SHIFT + ZERO)

// ---- x

// 256 numbers as they come: integers, of a8 in the first digit alone; of each 32 their scale, of each group its sum.
typedef struct {
    int8_t q[3][SUPER];
    float d[8], s[GROUPS];
} numbers;

#define DIGITS 1
#include PACK_1
#undef DIGITS
#define DIGITS 3
#include PACK_3
#undef DIGITS

// Blocks of activations (float d, float s, 32 int8).
static void read_blocks(numbers* to, const uint8_t* blocks, int64_t count) {
    for (int b = 0; b < count / 32; ++b, blocks += ACTIVATION_BYTES) {
        memcpy(&to->d[b], blocks, 4);
        memcpy(to->q[0] + 32 * b, blocks + 8, 32);
        if (GROUPS == 8) memcpy(&to->s[b], blocks + 4, 4);
        for (int group = 0; MINIMUM && GROUPS == 16 && group < 2;
             ++group) {  // has no sum in a block: that of its codes
            int sum = 0;
            for (int j = 0; j < 16; ++j) sum += to->q[0][32 * b + 16 * group + j];
            to->s[2 * b + group] = to->d[b] * (float)sum;
        }
    }
}

// Three digits by group of 32: x = d * (2^16 q0 + 2^8 q1 + q2), d the power of two by which the largest becomes at most
// 127 * 2^16. Off by 2^-23 of the largest at most; numbers of few bits are exact.
static void read_floats(numbers* to, const float* x, int64_t count) {
    int32_t largest[8] = {0};
    float unit[8], inverse[8];
    for (int b = 0; b < count / 32; ++b) {
        const i32x16 low = magnitude_bits(load_ints(x + 32 * b)), high = magnitude_bits(load_ints(x + 32 * b + 16));
        largest[b] = largest_of_ints(larger_ints(low, high));
    }
    for (int b = 0; b < 8; ++b) {
        float most;
        memcpy(&most, &largest[b], sizeof most);
        // 2^e with most / 2^e in (127 * 2^15, 127 * 2^16], e from -126 on
        const int of_most = exponent_of(most / 127) - 16;
        const int exponent = of_most < -126 || largest[b] >= 0x7f800000 ? -126 : of_most;
        unit[b] = power_of_two(exponent), inverse[b] = power_of_two(-exponent);
    }
    for (int b = 0; b < count / 32; ++b) {
        f32x16 parts[2];
        for (int j = 0; j < 2; ++j) {
            const int at = 32 * b + 16 * j;
            parts[j] = load_floats(x + at);
            const i32x16 code = nearest_ints(mul_all(parts[j], inverse[b])), q2 = low_byte(code);
            const i32x16 rest = shift_ints_right(sub_ints(code, q2), 8), q1 = low_byte(rest);
            store_low_bytes(to->q[2] + at, q2), store_low_bytes(to->q[1] + at, q1);
            store_low_bytes(to->q[0] + at, shift_ints_right(sub_ints(rest, q1), 8));
        }
        to->d[b] = largest[b] < 0x7f800000 ? unit[b] : __builtin_nanf("");
        if (GROUPS == 8)
            to->s[b] = sum_of(add_floats(parts[0], parts[1]));
        else
            to->s[2 * b] = sum_of(parts[0]), to->s[2 * b + 1] = sum_of(parts[1]);
    }
}

#include "tiles.h"

// Of a row of x.
int64_t qgemm_packed_bytes(int32_t digits, int32_t tiles, int64_t k) {
    if (!digits) return bytes_of_floats(k);
    const int64_t size = digits == 3 ? sizeof(packed_3) : tiles ? sizeof(tiled) : sizeof(packed_1);
    return (k + SUPER - 1) / SUPER * size;
}

// Rows first .. last - 1 of x: what a thread does.
void qgemm_pack(const void* argument, int64_t first, int64_t last) {
    const packing* p = argument;
    const uint64_t mode = ieee_mode();
    const word_order words = order_of_words();
    const int64_t supers = (p->k + SUPER - 1) / SUPER, size = p->to_row / supers;
    for (int64_t row = first; row < last; ++row) {
        const char* x = p->x + row * p->x_row;
        if (!p->digits) {
            pack_for_panels(p, row, (const float*)x, &words);
            continue;
        }
        for (int64_t i = 0; i < supers; ++i) {
            const int64_t at = i * SUPER, count = p->k - at < SUPER ? p->k - at : SUPER;
            void* to = p->to + (p->tiles ? i * p->m + row : row * supers + i) * size;
            numbers found;
            if (count < SUPER) memset(&found, 0, sizeof found);
            if (p->digits == 3) {
                read_floats(&found, (const float*)x + at, count);
                pack_3(to, &found);
                continue;
            }
            uint8_t blocks[SUPER / 32 * ACTIVATION_BYTES];
            if (p->quantize) p->quantize(blocks, (const float*)x + at, count / 32);
            read_blocks(&found, p->quantize ? blocks : (const uint8_t*)x + at / 32 * ACTIVATION_BYTES, count);
            if (p->tiles)
                tile_numbers(to, &found, &words);
            else
                pack_1(to, &found);
        }
    }
    restore_mode(mode);
}

// ---- products

#ifdef SUM_LANES
// The sums of all digits: of the first, which counts 2^16, and of both others, which is in the place of the third.
#ifdef SHORT_DOTS
#define DOT_OF_ONE(sum, codes, q) short_dot(codes, q)
#define SUMS_OF_ONE sums_of_short_dots
#else
#define DOT_OF_ONE dot
#define SUMS_OF_ONE sums_of_groups
#endif

INLINE group_floats together_1(const i32x16 dots[1][ACCS], const int32_t zero[2][SUM_LANES]) {
    const group_ints all = SUMS_OF_ONE(dots[0]);
    return group_floats_of(INTEGER_ZERO(1) ? add_group_ints(all, load_group_ints(zero[0])) : all);
}

INLINE group_floats together_3(const i32x16 dots[3][ACCS], const int32_t zero[2][SUM_LANES]) {
    group_ints first = sums_of_groups(dots[0]), rest = sums_of_groups(dots[2]);
    if (INTEGER_ZERO(3)) {
        first = add_group_ints(first, load_group_ints(zero[0]));
        rest = add_group_ints(rest, load_group_ints(zero[1]));
    }
    return mul_add_groups(group_floats_of(rest), group_floats_of(first), all_group_floats(0x1p16f));
}
#define TOGETHER(digits) TOGETHER_(digits)
#define TOGETHER_(digits) together_##digits
#endif

#define PACKED(digits) PACKED_(digits)
#define PACKED_(digits) packed_##digits

// x of the DIGITS, and names of the functions for so many TOKENS and DIGITS.
#define X PACKED(DIGITS)
#define ROWS_NAME(name) ROWS_NAME_(name, DIGITS, TOKENS)
#define ROWS_NAME_(name, digits, tokens) ROWS_NAME__(name, digits, tokens)
#define ROWS_NAME__(name, digits, tokens) name##_##digits##_##tokens

#define DIGITS 1
#define TOKENS 4
#include ROWS_1
#undef TOKENS
#define TOKENS 2
#include ROWS_1
#undef TOKENS
#define TOKENS 1
#include ROWS_1
#undef TOKENS
#undef DIGITS
#define DIGITS 3
#define TOKENS 2
#include ROWS_3
#undef TOKENS
#define TOKENS 1
#include ROWS_3

// ---- weights

#include "decode.h"
#include "to_eight_bits.h"

// Rows first .. last - 1 of W by all rows of x: what a thread does. Tiles take a multiple of TOKENS_OF_TILE rows of x,
// up to MOST_TOKENS.
void qgemm_rows(const void* argument, int64_t first, int64_t last) {
    const product* p = argument;
    const uint64_t mode = ieee_mode();
    int64_t token = 0;
    if (p->tiles) {
        (p->digits == 1 ? integer_tiles : float_tiles)(p, first, last);
    } else if (p->digits == 1) {
        for (; token + 4 <= p->m; token += 4) rows_1_4(p, token, first, last);
        for (; token + 2 <= p->m; token += 2) rows_1_2(p, token, first, last);
        for (; token < p->m; ++token) rows_1_1(p, token, first, last);
    } else {
        for (; token + 2 <= p->m; token += 2) rows_3_2(p, token, first, last);
        for (; token < p->m; ++token) rows_3_1(p, token, first, last);
    }
    restore_mode(mode);
}
