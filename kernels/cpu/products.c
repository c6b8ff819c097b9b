// y [m, n] = x [m, k] @ W [n, k].T of one format, from the blocks of a file.
//
// Macros of the compiler's command line (qgemm/cpu/native/products.py): FORMAT_HEADER, BLOCK_BYTES, BLOCK_WEIGHTS, of a
// codebook LEVELS_PLUS_SHIFT; ACTIVATION_BYTES, a block's of activations; PRODUCT_FIELDS, of what a job is told;
// TOKENS_OF_TILE and MOST_TOKENS, rows of x.
#include FORMAT_HEADER
#include "groups.h"

#define SUPER_BYTES (SUPER / BLOCK_WEIGHTS * BLOCK_BYTES)
#ifndef ZERO
#define ZERO 0
#endif
#ifndef SHIFT
#define SHIFT 0
#endif
#ifndef MINIMUM
#define MINIMUM 0
#endif

// a8 takes the zero from the rounded sum of x, as ggml's formula does; a16 from the digits, which is exact.
#define HAS_MINIMUM(digits) (MINIMUM || (ZERO && (digits) == 1))
#define MINIMUM_OF(w) (MINIMUM ? (w).minimum : mul_all((w).scale, -(float)ZERO))
#define INTEGER_ZERO(digits) ((digits) == 1 ? SHIFT : SHIFT + ZERO)
#define HAS_INIT(digits) (INTEGER_ZERO(digits) != 0)

typedef struct {
    PRODUCT_FIELDS
} product;

// ---- words of four codes, group by group

#define ROWS_OF_TILE 16
#define WORDS_OF_GROUP (SUPER / 4 / GROUPS)

typedef struct {
    uint8_t at[64];  // where word i of the vectors of codes lies among those of its group, and of the groups before
} word_order;

INLINE word_order order_of_words(void) {
    word_order found;
    int count[GROUPS] = {0};
    for (int i = 0; i < 64; ++i) {
        const int group = WEIGHT_OF(i / 16, 4 * (i % 16)) * GROUPS / SUPER;
        found.at[i] = (uint8_t)(group * WORDS_OF_GROUP + count[group]++);
    }
    return found;
}

// 16 rows of 256 weights, a row a lane.
typedef struct {
    u8x64 codes[64];
    f32x16 scale[GROUPS], minimum[GROUPS];
} tile;

static void unpack_tile(tile* to, const product* p, int64_t row, int rows, int64_t i, const word_order* words) {
    uint32_t* codes = (uint32_t*)to->codes;
    float *scale = (float*)to->scale, *minimum = (float*)to->minimum;
    const int64_t left = p->k - i * SUPER;
    for (int r = 0; r < ROWS_OF_TILE; ++r) {
        const uint8_t* blocks = (const uint8_t*)p->w + (row + (r < rows ? r : rows - 1)) * p->w_row + i * SUPER_BYTES;
        uint8_t padded[SUPER_BYTES];
        if (left < SUPER) {
            memset(padded, 0, sizeof padded);
            memcpy(padded, blocks, left / BLOCK_WEIGHTS * BLOCK_BYTES);
            blocks = padded;
        }
        const unpacked w = unpack(blocks);
        uint32_t found[64];
        float scales[16], minimums[16];
        memcpy(found, w.codes, sizeof found), memcpy(scales, &w.scale, sizeof scales);
        for (int word = 0; word < 64; ++word) codes[ROWS_OF_TILE * words->at[word] + r] = found[word];
        for (int group = 0; group < GROUPS; ++group) scale[ROWS_OF_TILE * group + r] = scales[group];
        if (MINIMUM || ZERO) {
            const f32x16 of_sums = MINIMUM_OF(w);
            memcpy(minimums, &of_sums, sizeof minimums);
            for (int group = 0; group < GROUPS; ++group) minimum[ROWS_OF_TILE * group + r] = minimums[group];
        }
    }
}

// ---- x

// 256 numbers as they come: integers, of a8 in the first digit alone, and of each 32 scale and sum.
typedef struct {
    int8_t q[3][SUPER];
    float d[8], s[8];
} numbers;

#define DIGITS 1
#include "pack.h"
#undef DIGITS
#define DIGITS 3
#include "pack.h"
#undef DIGITS

// Blocks of activations (float d, float s, 32 int8).
static void read_blocks(numbers* to, const uint8_t* blocks, int64_t count) {
    memset(to, 0, sizeof *to);
    for (int b = 0; b < count / 32; ++b, blocks += ACTIVATION_BYTES) {
        memcpy(&to->d[b], blocks, 4), memcpy(&to->s[b], blocks + 4, 4);
        memcpy(to->q[0] + 32 * b, blocks + 8, 32);
    }
}

// Three digits by group of 32: x = d * (2^16 q0 + 2^8 q1 + q2), d the power of two by which the largest becomes at most
// 127 * 2^16. Off by 2^-23 of the largest at most; numbers of few bits are exact.
static void read_floats(numbers* to, const float* x, int64_t count) {
    memset(to, 0, sizeof *to);
    for (int b = 0; b < count / 32; ++b) {
        const float* from = x + 32 * b;
        float most = 0, sum = 0;
        for (int j = 0; j < 32; ++j) {
            const float size = __builtin_fabsf(from[j]);
            most = size > most || size != size ? size : most;
            sum += from[j];
        }
        // 2^e with most / 2^e in (127 * 2^15, 127 * 2^16], e from -126 on
        int exponent = -126;
        if (most > 0 && most <= 3.4028234e38f) {
            __builtin_frexpf(most / 127, &exponent);
            exponent -= 16;
            if (exponent < -126) exponent = -126;
        }
        const float unit = power_of_two(exponent), inverse = power_of_two(-exponent);
        for (int j = 0; j < 32; ++j) {
            const float scaled = from[j] * inverse;
            const int32_t number = scaled > -9e6f && scaled < 9e6f ? (int32_t)__builtin_rintf(scaled) : 0;
            const int8_t q2 = (int8_t)number, q1 = (int8_t)((number - q2) >> 8);
            to->q[2][32 * b + j] = q2, to->q[1][32 * b + j] = q1;
            to->q[0][32 * b + j] = (int8_t)((((number - q2) >> 8) - q1) >> 8);
        }
        to->d[b] = most <= 3.4028234e38f ? unit : most - most;  // NaN
        to->s[b] = sum;
    }
}

int64_t qgemm_packed_bytes(int32_t digits, int32_t tiles, int64_t k) {
    const int64_t size = digits == 1 ? tiles ? sizeof(tiled_1) : sizeof(packed_1)
                         : tiles     ? sizeof(tiled_3)
                                     : sizeof(packed_3);
    return (k + SUPER - 1) / SUPER * size;
}

// x [m, k], contiguous, -> packed: blocks of activations for digits = 1, floats for 3.
void qgemm_pack(void* to, const void* x, int32_t digits, int32_t tiles, int64_t m, int64_t k) {
    const unsigned mode = ieee_mode();
    const word_order words = order_of_words();
    const int64_t supers = (k + SUPER - 1) / SUPER, size = supers ? qgemm_packed_bytes(digits, tiles, k) / supers : 0;
    for (int64_t row = 0; row < m; ++row)
        for (int64_t i = 0; i < supers; ++i, to = (char*)to + size) {
            const int64_t at = i * SUPER, count = k - at < SUPER ? k - at : SUPER;
            numbers found;
            if (digits == 1)
                read_blocks(&found, (const uint8_t*)x + (row * k + at) / 32 * ACTIVATION_BYTES, count);
            else
                read_floats(&found, (const float*)x + row * k + at, count);
            if (digits == 1)
                tiles ? tile_1(to, &found, &words) : pack_1(to, &found);
            else
                tiles ? tile_3(to, &found, &words) : pack_3(to, &found);
        }
    restore_mode(mode);
}

// ---- products

// The sums of all digits; the first counts 2^16.
INLINE f32x16 together_1(const i32x16 dots[1][ACCS]) { return to_float(sums_of_groups(dots[0])); }
INLINE f32x16 together_3(const i32x16 dots[3][ACCS]) {
    i32x16 low[ACCS];
    for (int acc = 0; acc < ACCS; ++acc) low[acc] = after(dots[1][acc], dots[2][acc]);
    return mul_add(to_float(sums_of_groups(low)), to_float(sums_of_groups(dots[0])), all_floats(0x1p16f));
}
#define TOGETHER(digits) TOGETHER_(digits)
#define TOGETHER_(digits) together_##digits

INLINE f32x16 digits_together_1(const i32x16 dots[1]) { return to_float(dots[0]); }
INLINE f32x16 digits_together_3(const i32x16 dots[3]) {
    return mul_add(to_float(after(dots[1], dots[2])), to_float(dots[0]), all_floats(0x1p16f));
}
#define DIGITS_TOGETHER(digits) DIGITS_TOGETHER_(digits)
#define DIGITS_TOGETHER_(digits) digits_together_##digits

#define TILED(digits) TILED_(digits)
#define TILED_(digits) tiled_##digits
#define PACKED(digits) PACKED_(digits)
#define PACKED_(digits) packed_##digits

#define DIGITS 1
#define TOKENS TOKENS_OF_TILE
#include "tiles.h"
#undef TOKENS
#define TOKENS 4
#include "rows.h"
#undef TOKENS
#define TOKENS 2
#include "rows.h"
#undef TOKENS
#define TOKENS 1
#include "rows.h"
#undef TOKENS
#undef DIGITS
#define DIGITS 3
#define TOKENS (TOKENS_OF_TILE / 2)  // whose sums the registers hold
#include "tiles.h"
#undef TOKENS
#define TOKENS 2
#include "rows.h"
#undef TOKENS
#define TOKENS 1
#include "rows.h"

// Rows first .. last - 1 of W by all rows of x: what a thread does. Tiles take a multiple of TOKENS_OF_TILE rows of x, up
// to MOST_TOKENS.
void qgemm_rows(const void* argument, int64_t first, int64_t last) {
    const product* p = argument;
    const unsigned mode = ieee_mode();
    int64_t token = 0;
    if (p->tiles) {
        (p->digits == 1 ? tiles_1 : tiles_3)(p, first, last);
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
