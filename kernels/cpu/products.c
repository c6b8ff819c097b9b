// y [m, n] = x [m, k] @ W [n, k].T of one format, from the blocks of a file.
//
// Macros of the compiler's command line (qgemm/cpu/native/products.py): FORMAT_HEADER, BLOCK_BYTES, BLOCK_WEIGHTS, of a
// codebook LEVELS_PLUS_SHIFT; ACTIVATION_BYTES, a block's of activations; PRODUCT_FIELDS, of what a job is told.
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

// 256 numbers of x in the order of the codes: digits, the scale of each lane's group and the sum of each group, and what
// takes the zero away.
#define PACKED_TYPE(digits)                                    \
    typedef struct {                                           \
        float d[16], s[16];                                    \
        int8_t q[digits][SUPER];                               \
        int32_t init[HAS_INIT(digits) ? digits : 0][ACCS][16]; \
    } packed_##digits;
#define PACKED(digits) PACKED_(digits)
#define PACKED_(digits) packed_##digits
PACKED_TYPE(1)
PACKED_TYPE(3)

typedef struct {
    PRODUCT_FIELDS
} product;

int64_t qgemm_packed_bytes(int32_t digits, int64_t k) {
    return (k + SUPER - 1) / SUPER * (int64_t)(digits == 1 ? sizeof(packed_1) : sizeof(packed_3));
}

// Integers q [SUPER] in the order of weights -> in that of codes, and what takes the zero from the sums of each lane.
INLINE void in_order(int8_t* to, const int8_t* q) {
    for (int v = 0; v < 4; ++v)
        for (int i = 0; i < 64; ++i) to[64 * v + i] = q[WEIGHT_OF(v, i)];
}

INLINE void start(int32_t init[ACCS][16], const int8_t* q, int zero) {
    memset(init, 0, sizeof(int32_t) * ACCS * 16);
    for (int v = 0; v < 4; ++v)
        for (int i = 0; i < 64; ++i) init[ACC_OF(v)][i / 4] -= zero * q[64 * v + i];
}

// Scales of 32 numbers each -> of the groups of lanes.
INLINE void scale_lanes(float d[16], const float* of_32) {
    for (int lane = 0; lane < 16; ++lane)
        d[lane] = GROUPS == 8 && GROUP_OF_LANE[lane] == NONE ? 0 : of_32[GROUP_OF_LANE[lane] * 8 / GROUPS];
}

// The sums of all digits; the first counts 2^16.
INLINE f32x16 together_1(const i32x16 dots[1][ACCS]) { return to_float(sums_of_groups(dots[0])); }
INLINE f32x16 together_3(const i32x16 dots[3][ACCS]) {
    i32x16 low[ACCS];
    for (int acc = 0; acc < ACCS; ++acc) low[acc] = after(dots[1][acc], dots[2][acc]);
    const f32x16 high = mul_all(to_float(sums_of_groups(dots[0])), 0x1p16f);
    f32x16 all = to_float(sums_of_groups(low));
    EACH all.part[i] += high.part[i];
    return all;
}
#define TOGETHER(digits) TOGETHER_(digits)
#define TOGETHER_(digits) together_##digits

// Blocks of activations (float d, float s, 32 int8) of one row -> packed.
static void pack_blocks(packed_1* packed, const uint8_t* blocks, int64_t k) {
    for (int64_t first = 0; first < k; first += SUPER, ++packed) {
        int8_t q[SUPER] = {0};
        float d[8] = {0};
        memset(packed, 0, sizeof *packed);
        for (int b = 0; b < 8 && first + 32 * b < k; ++b, blocks += ACTIVATION_BYTES) {
            memcpy(q + 32 * b, blocks + 8, 32);
            memcpy(&d[b], blocks, 4);
            if (GROUPS == 8) memcpy(&packed->s[b], blocks + 4, 4);
        }
        scale_lanes(packed->d, d);
        in_order(packed->q[0], q);
        if (HAS_INIT(1)) start(packed->init[0], packed->q[0], INTEGER_ZERO(1));
    }
}

// Numbers of one row -> three digits by group of 32: x = d * (2^16 q0 + 2^8 q1 + q2), d the power of two by which the
// largest becomes at most 127 * 2^16. Off by 2^-23 of the largest at most; numbers of few bits are exact.
static void pack_floats(packed_3* packed, const float* x, int64_t k) {
    for (int64_t first = 0; first < k; first += SUPER, ++packed) {
        int8_t q[3][SUPER] = {{0}};
        float d[8] = {0};
        memset(packed, 0, sizeof *packed);
        for (int b = 0; b < 8 && first + 32 * b < k; ++b) {
            const float* from = x + first + 32 * b;
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
                q[2][32 * b + j] = q2, q[1][32 * b + j] = q1;
                q[0][32 * b + j] = (int8_t)((((number - q2) >> 8) - q1) >> 8);
            }
            d[b] = most <= 3.4028234e38f ? unit : most - most;  // NaN
            if (GROUPS == 8) packed->s[b] = sum;
        }
        scale_lanes(packed->d, d);
        for (int digit = 0; digit < 3; ++digit) {
            in_order(packed->q[digit], q[digit]);
            if (HAS_INIT(3)) start(packed->init[digit], packed->q[digit], INTEGER_ZERO(3));
        }
    }
}

// x [m, k], contiguous, -> packed: blocks of activations for digits = 1, floats for 3.
void qgemm_pack(void* to, const void* x, int32_t digits, int64_t m, int64_t k) {
    const unsigned mode = ieee_mode();
    const int64_t size = qgemm_packed_bytes(digits, k);
    for (int64_t row = 0; row < m; ++row) {
        void* packed = (char*)to + row * size;
        if (digits == 1)
            pack_blocks(packed, (const uint8_t*)x + row * (k / 32 * ACTIVATION_BYTES), k);
        else
            pack_floats(packed, (const float*)x + row * k, k);
    }
    restore_mode(mode);
}

#define DIGITS 1
#define TOKENS 4
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

// Rows first .. last - 1 of W by all rows of x: what a thread does.
void qgemm_rows(const void* argument, int64_t first, int64_t last) {
    const product* p = argument;
    const unsigned mode = ieee_mode();
    int64_t token = 0;
    if (p->digits == 1) {
        for (; token + 4 <= p->m; token += 4) rows_1_4(p, token, first, last);
        for (; token < p->m; ++token) rows_1_1(p, token, first, last);
    } else {
        for (; token + 2 <= p->m; token += 2) rows_3_2(p, token, first, last);
        for (; token < p->m; ++token) rows_3_1(p, token, first, last);
    }
    restore_mode(mode);
}
