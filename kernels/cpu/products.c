// y [m, n] = x [m, k] @ W [n, k].T of one format whose codes are integers, from the blocks of a file.
//
// Macros besides those of blocks.h: of a codebook LEVELS_PLUS_SHIFT; ACTIVATION_BYTES, a block's of activations.
#include "blocks.h"
#include "groups.h"
#include "panels.h"

// a8 takes the zero from the rounded sum of x, as ggml's formula does; a16 from the digits, which is exact.
#define HAS_MINIMUM(digits) (MINIMUM || (ZERO && (digits) == 1))
#define INTEGER_ZERO(digits) ((digits) == 1 ? SHIFT : SHIFT + ZERO)
#define HAS_INIT(digits) (INTEGER_ZERO(digits) != 0)

// ---- x

// 256 numbers as they come: integers, of a8 in the first digit alone; of each 32 their scale, of each group its sum.
typedef struct {
    int8_t q[3][SUPER];
    float d[8], s[GROUPS];
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
        memcpy(&to->d[b], blocks, 4);
        memcpy(to->q[0] + 32 * b, blocks + 8, 32);
        if (GROUPS == 8) memcpy(&to->s[b], blocks + 4, 4);
        for (int group = 0; GROUPS == 16 && group < 2; ++group) {  // has no sum in a block: that of its codes
            int sum = 0;
            for (int j = 0; j < 16; ++j) sum += to->q[0][32 * b + 16 * group + j];
            to->s[2 * b + group] = to->d[b] * (float)sum;
        }
    }
}

// Three digits by group of 32: x = d * (2^16 q0 + 2^8 q1 + q2), d the power of two by which the largest becomes at most
// 127 * 2^16. Off by 2^-23 of the largest at most; numbers of few bits are exact.
static void read_floats(numbers* to, const float* x, int64_t count) {
    memset(to, 0, sizeof *to);
    for (int b = 0; b < count / 32; ++b) {
        const float* from = x + 32 * b;
        float most = 0;
        for (int j = 0; j < 32; ++j) {
            const float size = __builtin_fabsf(from[j]);
            most = size > most || size != size ? size : most;
            to->s[(32 * b + j) * GROUPS / SUPER] += from[j];
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
    }
}

#include "tiles.h"

// Of a row of x.
int64_t qgemm_packed_bytes(int32_t digits, int32_t tiles, int64_t k) {
    if (!digits) return bytes_of_floats(k);
    const int64_t size = digits == 3 ? sizeof(packed_3) : tiles ? sizeof(tiled) : sizeof(packed_1);
    return (k + SUPER - 1) / SUPER * size;
}

// x [m, k], contiguous, -> packed: blocks of activations for digits = 1, else floats; those of no digits for tiles.
void qgemm_pack(void* to, const void* x, int32_t digits, int32_t tiles, int64_t m, int64_t k) {
    const uint64_t mode = ieee_mode();
    const word_order words = order_of_words();
    const int64_t supers = digits ? (k + SUPER - 1) / SUPER : 0;
    const int64_t size = supers ? qgemm_packed_bytes(digits, tiles, k) / supers : 0;
    if (!digits) pack_for_panels(to, x, m, k);
    for (int64_t row = 0; row < m; ++row)
        for (int64_t i = 0; i < supers; ++i, to = (char*)to + size) {
            const int64_t at = i * SUPER, count = k - at < SUPER ? k - at : SUPER;
            numbers found;
            if (digits == 1)
                read_blocks(&found, (const uint8_t*)x + (row * k + at) / 32 * ACTIVATION_BYTES, count);
            else
                read_floats(&found, (const float*)x + row * k + at, count);
            if (tiles)
                tile_numbers(to, &found, &words);
            else
                digits == 1 ? pack_1(to, &found) : pack_3(to, &found);
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

#define PACKED(digits) PACKED_(digits)
#define PACKED_(digits) packed_##digits

#define DIGITS 1
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
#define TOKENS 2
#include "rows.h"
#undef TOKENS
#define TOKENS 1
#include "rows.h"

// Rows first .. last - 1 of W by all rows of x: what a thread does. Tiles take a multiple of TOKENS_OF_TILE rows of x, up
// to MOST_TOKENS.
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
