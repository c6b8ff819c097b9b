// y [m, n] = x [m, k] @ W [n, k].T for one format with integer codes, straight from the blocks of a file.
//
// Macros besides those of blocks.h (qgemm/cpu/native/libraries.py): LEVELS, the levels of a codebook;
// ACTIVATION_BYTES, bytes of a block of activations; LEAST_LEVEL, GREATEST_LEVEL, LEAST_EIGHT_BITS (to_eight_bits.h).
#include "blocks.h"

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
    return (tiles ? (k + SUPER - 1) / SUPER : supers_of_x(k)) * size;
}

// Reads columns 256 * i to 256 * i + 255 of a row of x, which begins again at its end where super-blocks span rows.
static void read_super_of_x(quantized_x* to, const packing* p, const char* x, int64_t i) {
    const int is_quantized = p->digits == 1 && !p->quantize;
    const int64_t bytes = is_quantized ? ACTIVATION_BYTES : 32 * sizeof(float), left = p->k - i * SUPER;
    const int64_t first = i * (SUPER / 32);  // block of 32 columns
    int64_t count = left < SUPER ? left : SUPER;
    const void* from = x + first * bytes;
    float repeated[SUPER];
    uint8_t blocks[SUPER / 32 * ACTIVATION_BYTES];
    if (!p->tiles && spans_rows(p->k)) {
        for (int b = 0; b < SUPER / 32; ++b)
            memcpy((char*)repeated + b * bytes, x + (first + b) % (p->k / 32) * bytes, bytes);
        from = repeated, count = SUPER;
    }
    if (count < SUPER) memset(to, 0, sizeof *to);
    if (p->quantize && p->digits == 1) p->quantize(blocks, from, count / 32);
    if (p->digits == 3)
        read_floats(to, from, count);
    else
        read_blocks(to, is_quantized ? from : blocks, count);
}

// Packs rows first to last - 1 of x: one thread's share.
void qgemm_pack(const void* argument, int64_t first, int64_t last) {
    const packing* p = argument;
    const uint64_t mode = enter_ieee_mode();
    const word_order words = make_word_order();
    const int64_t supers = p->tiles ? (p->k + SUPER - 1) / SUPER : supers_of_x(p->k);
    for (int64_t row = first; row < last; ++row) {
        const char* x = p->x + row * p->x_row;
        if (!p->digits) {
            pack_for_panels(p, row, (const float*)x, &words);
            continue;
        }
        for (int64_t i = 0; i < supers; ++i) {
            const int64_t place = p->tiles ? i * p->m + row : row * supers + i;
            quantized_x values;
            read_super_of_x(&values, p, x, i);
            if (p->digits == 1 && p->tiles)
                pack_tile((tile_x*)p->to + place, &values, &words);
            else if (p->digits == 1)
                pack_1((packed_1*)p->to + place, &values);
#ifdef INTERLEAVED_ROWS
            else if (p->tiles)
                pack_words_3((packed_3*)p->to + place, &values, &words);
#endif
            else
                pack_3((packed_3*)p->to + place, &values);
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

#ifdef SPANNING
static void multiply_spanning_rows(const product* p, int64_t first, int64_t last) {
    for (int64_t token = 0; token < p->m; ++token)
        if (p->digits == 1)
            spanning_rows_1_1(p, token, first, last);
        else
            spanning_rows_3_1(p, token, first, last);
}
#endif

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
#ifdef SPANNING
    else if (spans_rows(p->k))
        multiply_spanning_rows(p, first, last);
#endif
    else if (p->digits == 1)
        multiply_rows_1(p, 0, first, last);
    else
        multiply_rows_3(p, 0, first, last);
    restore_mode(mode);
}
