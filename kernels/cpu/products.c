// y [m, n] = x [m, k] @ W [n, k].T for one format with integer codes, straight from the blocks of a file.
//
// Macros besides those of blocks.h (qgemm/cpu/native/libraries.py): LEVELS, the levels of a codebook;
// ACTIVATION_BYTES, bytes of a block of activations; LEAST_LEVEL, GREATEST_LEVEL, LEAST_EIGHT_BITS (to_eight_bits.h).
#include "blocks.h"

#include "signed_codes.h"

// Picks the reduction for one digit of x and for three: lane_rows.h scales each lane and then reduces; rows.h reduces
// each group in int32 and then scales. A format with LANE_SCALES and a zero point that also defines LOW_GROUP uses
// lane_rows.h for one digit and rows.h for three.
#ifdef LANE_SCALES
#define PACK_1 "pack_lanes.h"
#define ROWS_1 "lane_rows.h"
#else
#define PACK_1 "pack_groups.h"
#define ROWS_1 "rows.h"
#endif
#if defined(LANE_SCALES) && (!defined(LOW_GROUP) || SHIFT + ZERO == 0)
#define PACK_3 "pack_lanes.h"
#define ROWS_3 "lane_rows.h"
#else
#include "group_sums.h"
#define PACK_3 "pack_groups.h"
#define ROWS_3 "rows.h"
#endif
#include "float_tiles.h"

// With one digit (a8) the format's zero point is subtracted by the rounded sum of x, as in ggml's formula; with three
// (a16) by the integer sums, which is exact. Signed codes have no zero point.
#define ZERO_FROM_SUM(digits) (ZERO && (digits) == 1)
#define INTEGER_ZERO(digits) (SIGNED_CODES ? 0 : (digits) == 1 ? SHIFT : SHIFT + ZERO)

// ---- x

// 256 numbers of x in order: int8 digits (one digit uses q[0] only), a scale for each 32, the sum of each group.
typedef struct {
    int8_t q[3][SUPER];
    float d[8], s[GROUPS];
} quantized_x;

#define DIGITS 1
#include PACK_1
#undef DIGITS
#define DIGITS 3
#include PACK_3
#undef DIGITS

// Reads blocks of activations: float d, float s, 32 int8.
static void read_blocks(quantized_x* to, const uint8_t* blocks, int64_t count) {
    for (int b = 0; b < count / 32; ++b, blocks += ACTIVATION_BYTES) {
        memcpy(&to->d[b], blocks, 4);
        memcpy(to->q[0] + 32 * b, blocks + 8, 32);
        if (GROUPS == 8) memcpy(&to->s[b], blocks + 4, 4);
        for (int group = 0; MINIMUM && GROUPS == 16 && group < 2; ++group) {  // a block has no sum of 16 codes
            int sum = 0;
            for (int j = 0; j < 16; ++j) sum += to->q[0][32 * b + 16 * group + j];
            to->s[2 * b + group] = to->d[b] * (float)sum;
        }
    }
}

// Splits floats into three int8 digits for each group of 32: x = d * (2^16 q0 + 2^8 q1 + q2), where d is the power of
// two that brings the largest magnitude to at most 127 * 2^16. The error is at most 2^-23 of the largest magnitude;
// numbers with few significant bits are exact.
static void read_floats(quantized_x* to, const float* x, int64_t count) {
    int32_t largest[8] = {0};
    float unit[8], inverse[8];
    for (int b = 0; b < count / 32; ++b) {
        const i32x16 low = magnitude_bits(load_ints(x + 32 * b)), high = magnitude_bits(load_ints(x + 32 * b + 16));
        largest[b] = reduce_max_ints(max_ints(low, high));
    }
    for (int b = 0; b < 8; ++b) {
        float magnitude;
        memcpy(&magnitude, &largest[b], sizeof magnitude);
        // The largest magnitude divided by 2^exponent lies in (127 * 2^15, 127 * 2^16]; exponents start at -126.
        const int least_exponent = frexp_exponent(magnitude / 127) - 16;
        const int exponent = least_exponent < -126 || largest[b] >= 0x7f800000 ? -126 : least_exponent;
        unit[b] = power_of_two(exponent), inverse[b] = power_of_two(-exponent);
    }
    for (int b = 0; b < count / 32; ++b) {
        f32x16 parts[2];
        for (int j = 0; j < 2; ++j) {
            const int column = 32 * b + 16 * j;
            parts[j] = load_floats(x + column);
            const i32x16 code = nearest_ints(mul_all(parts[j], inverse[b])), q2 = sign_extend_byte(code);
            const i32x16 rest = shift_ints_right(sub_ints(code, q2), 8), q1 = sign_extend_byte(rest);
            store_low_bytes(to->q[2] + column, q2), store_low_bytes(to->q[1] + column, q1);
            store_low_bytes(to->q[0] + column, shift_ints_right(sub_ints(rest, q1), 8));
        }
        to->d[b] = largest[b] < 0x7f800000 ? unit[b] : __builtin_nanf("");
        if (GROUPS == 8)
            to->s[b] = reduce_add(add_floats(parts[0], parts[1]));
        else
            to->s[2 * b] = reduce_add(parts[0]), to->s[2 * b + 1] = reduce_add(parts[1]);
    }
}

#include "integer_tiles.h"

// Bytes of a packed row of x.
int64_t qgemm_packed_bytes(int32_t digits, int32_t tiles, int64_t k) {
    if (!digits) return packed_float_bytes(k);
    const int64_t size = digits == 3 ? sizeof(packed_3) : tiles ? sizeof(tile_x) : sizeof(packed_1);
    return (k + SUPER - 1) / SUPER * size;
}

// Packs rows first to last - 1 of x: one thread's share.
void qgemm_pack(const void* argument, int64_t first, int64_t last) {
    const packing* p = argument;
    const uint64_t mode = enter_ieee_mode();
    const word_order words = make_word_order();
    const int64_t supers = (p->k + SUPER - 1) / SUPER, size = p->to_row / supers;
    for (int64_t row = first; row < last; ++row) {
        const char* x = p->x + row * p->x_row;
        if (!p->digits) {
            pack_for_panels(p, row, (const float*)x, &words);
            continue;
        }
        for (int64_t i = 0; i < supers; ++i) {
            const int64_t column = i * SUPER, count = p->k - column < SUPER ? p->k - column : SUPER;
            void* to = p->to + (p->tiles ? i * p->m + row : row * supers + i) * size;
            quantized_x values;
            if (count < SUPER) memset(&values, 0, sizeof values);
            if (p->digits == 3) {
                read_floats(&values, (const float*)x + column, count);
#ifdef INTERLEAVED_ROWS
                if (p->tiles) {
                    pack_words_3(to, &values, &words);
                    continue;
                }
#endif
                pack_3(to, &values);
                continue;
            }
            uint8_t blocks[SUPER / 32 * ACTIVATION_BYTES];
            if (p->quantize) p->quantize(blocks, (const float*)x + column, count / 32);
            read_blocks(&values, p->quantize ? blocks : (const uint8_t*)x + column / 32 * ACTIVATION_BYTES, count);
            if (p->tiles)
                pack_tile(to, &values, &words);
            else
                pack_1(to, &values);
        }
    }
    restore_mode(mode);
}

// ---- products

#ifdef SUM_LANES
// Combines the sums of the digits. dots[2] already holds 2^8 q1 + q2; the first digit counts 2^16.
#ifdef SHORT_DOTS
#define ONE_DIGIT_SUMS sum_short_groups
#else
#define ONE_DIGIT_SUMS sum_groups
#endif

// sum + the dot products of the vectors of an accumulator.
#define EACH_VECTOR _Pragma("GCC unroll 4") for (int v = 0; v < 4; ++v) if (ACC_OF(v) == acc)
INLINE i32x16 code_dots_3(i32x16 sum, const u8x64 codes[4], const int8_t* q, const int acc, const int least) {
    (void)least;
#if SIGNED_CODES
    EACH_VECTOR sum = level_dot(sum, codes[v], load_codes(q + 64 * v), least);
#elif defined(SHORT_WORDS) && ACCS < 4 && ACCS * SHORT_WORDS >= 4
    i32x16 shorts = all_ints(0);
    EACH_VECTOR shorts = add_short_dot(shorts, codes[v], load_codes(q + 64 * v));
    sum = add_shorts(sum, shorts);
#else
    EACH_VECTOR sum = dot(sum, codes[v], load_codes(q + 64 * v));
#endif
    return sum;
}

INLINE i32x16 code_dots_1(i32x16 sum, const u8x64 codes[4], const int8_t* q, const int acc, const int least) {
#ifdef LEAST_CODES
    EACH_VECTOR sum = x_dot(sum, codes[v], load_codes(q + 64 * v), least);
    return sum;
#elif defined(SHORT_DOTS)
    (void)sum, (void)least;
    return short_dot(codes[acc], load_codes(q + 64 * acc));
#else
    return code_dots_3(sum, codes, q, acc, least);
#endif
}
#define CODE_DOTS(digits) CODE_DOTS_(digits)
#define CODE_DOTS_(digits) code_dots_##digits

INLINE group_floats combine_digits_1(const i32x16 dots[1][ACCS], const int32_t zero[2][SUM_LANES]) {
    const group_ints all = ONE_DIGIT_SUMS(dots[0]);
    return convert_group_ints(INTEGER_ZERO(1) ? add_group_ints(all, load_group_ints(zero[0])) : all);
}

INLINE group_floats combine_digits_3(const i32x16 dots[3][ACCS], const int32_t zero[2][SUM_LANES]) {
    group_ints first = sum_groups(dots[0]), rest = sum_groups(dots[2]);
    if (INTEGER_ZERO(3)) {
        first = add_group_ints(first, load_group_ints(zero[0]));
        rest = add_group_ints(rest, load_group_ints(zero[1]));
    }
    return mul_add_groups(convert_group_ints(rest), convert_group_ints(first), all_group_floats(0x1p16f));
}
#define COMBINE_DIGITS(digits) COMBINE_DIGITS_(digits)
#define COMBINE_DIGITS_(digits) combine_digits_##digits
#endif

#define PACKED(digits) PACKED_(digits)
#define PACKED_(digits) packed_##digits

#define X PACKED(DIGITS)

#define DIGITS 1
#define MAX_TOKENS 4
#define ROWS_HEADER ROWS_1
#include "token_ladder.h"
#undef DIGITS
#undef MAX_TOKENS
#undef ROWS_HEADER
#define DIGITS 3
#define MAX_TOKENS 2
#define ROWS_HEADER ROWS_3
#include "token_ladder.h"
#undef DIGITS
#undef MAX_TOKENS
#undef ROWS_HEADER
#ifdef INTERLEAVED_ROWS
// The codes of a group are a run of LANES words in each vector of an accumulator, which has RUNS of them.
enum { RUNS = 16 / LANES };
INLINE int run_of_group(int group) {
    int result = 0;
#pragma GCC unroll 16
    for (int run = 0; run < GROUPS; ++run)
        if (WEIGHT_OF(4 / ACCS * (run / RUNS), 4 * LANES * (run % RUNS)) * GROUPS / SUPER == group) result = run;
    return result;
}

#define ROWS_HEADER "rows_of_lanes.h"
#define DIGITS lanes_1
#define LANE_DIGITS 1
#define MAX_TOKENS (PARTS == 1 ? 4 : 2)
#include "token_ladder.h"
#undef DIGITS
#undef LANE_DIGITS
#undef MAX_TOKENS
#define DIGITS lanes_3
#define LANE_DIGITS 3
#define MAX_TOKENS (PARTS == 1 ? 2 : 1)
#include "token_ladder.h"
#endif

// ---- weights

#include "decode.h"
#include "to_eight_bits.h"

// Tiles are unpacked for a multiple of REGISTER_TOKENS rows of x, LEAST_UNPACKED at least. Other rows come with
// interleaved weights only, whose codes then stay in registers.
enum { LEAST_UNPACKED = PARTS == 1 ? 8 : 4 };
static void multiply_by_tiles(const product* p, int64_t first, int64_t last) {
    const int64_t tokens = p->m < LEAST_UNPACKED ? 0 : p->m / REGISTER_TOKENS * REGISTER_TOKENS;
    if (tokens) integer_tiles(p, tokens, first, last);
#ifdef INTERLEAVED_ROWS
    multiply_rows_lanes_1(p, tokens, first, last);
#endif
}

// Multiplies rows first to last - 1 of W by all rows of x: one thread's share. Float tiles accept a multiple of
// TOKENS_OF_TILE rows of x, up to MOST_TOKENS.
void qgemm_rows(const void* argument, int64_t first, int64_t last) {
    const product* p = argument;
    const uint64_t mode = enter_ieee_mode();
    if (p->tiles && p->digits == 1)
        multiply_by_tiles(p, first, last);
    else if (p->tiles && !p->digits)
        float_tiles(p, p->m, first, last);
#ifdef INTERLEAVED_ROWS
    else if (p->interleaved)
        multiply_rows_lanes_3(p, 0, first, last);
#endif
    else if (p->digits == 1)
        multiply_rows_1(p, 0, first, last);
    else
        multiply_rows_3(p, 0, first, last);
    restore_mode(mode);
}
