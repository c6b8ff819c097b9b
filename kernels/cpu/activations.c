// Quantizes x to blocks of activations, bit for bit as NumPy does: qgemm/codec/q8_1_f32.py and group_activations.py.
//
// Compiled with -ffp-contract=off: fma would give other bits than the separate roundings of NumPy.
//
// Macros (qgemm/cpu/native/products.py): QUANTIZATION_FIELDS, ROWS_FIELDS: fields of the arguments; UNIT, the unit of
// scales; ACTIVATION_BYTES, GROUPED_BYTES: sizes of blocks; LEAST_EIGHT_BITS: groups of smaller magnitudes become
// zeros.
#include "extremes.h"

typedef struct {
    float d, s;  // in units of UNIT
    int8_t q[32];
} activations;

typedef struct {
    QUANTIZATION_FIELDS
} quantization;

_Static_assert(sizeof(activations) == ACTIVATION_BYTES, "activations differ from their dtype");

// A block of "a8_g256": the blocks of a group share d; the last group of a row may be shorter.
typedef struct {
    float d;
    int8_t q[32];
} grouped;

// Rows of x [n, k] and their blocks [n, k / 32].
typedef struct {
    ROWS_FIELDS
} rows_of_x;

_Static_assert(sizeof(grouped) == GROUPED_BYTES, "activations of groups differ from their dtype");

enum { EIGHT_BLOCKS = 8 };

// Rounds to 11 bits by Veltkamp's splitting; NaN and infinity become NaN.
static float to_half_precision(float value) {
    const float above = value * 8193;
    return above + (value - above);
}

INLINE float largest_magnitude(const float* x) {
    const i32x16 both = max_ints(magnitude_bits(load_ints(x)), magnitude_bits(load_ints(x + 16)));
    return bits_float(reduce_max_ints(both));
}

// Stores x * inverse of 32 numbers, rounded to nearest with ties away from zero, and returns their sum.
INLINE int32_t store_codes(int8_t* to, const float* x, float inverse) {
    const i32x16 low = round_half_away(mul_all(load_floats(x), inverse));
    const i32x16 high = round_half_away(mul_all(load_floats(x + 16), inverse));
    store_low_bytes(to, low), store_low_bytes(to + 16, high);
    return reduce_add_ints(add_ints(low, high));
}

// Quantizes up to EIGHT_BLOCKS blocks, step by step: a single block would wait for two divisions.
static void quantize(activations* to, const float* x, int64_t count) {
    float d[EIGHT_BLOCKS] = {0}, inverse[EIGHT_BLOCKS], sums[EIGHT_BLOCKS] = {0};
    for (int64_t i = 0; i < count; ++i) d[i] = largest_magnitude(x + 32 * i);
    for (int i = 0; i < EIGHT_BLOCKS; ++i) d[i] = d[i] / 127, inverse[i] = 1 / d[i];
    for (int64_t i = 0; i < count; ++i)
        if (is_finite(d[i]) && is_finite(inverse[i]))  // codes are 0 where no product is finite, or all are 0
            sums[i] = (float)store_codes(to[i].q, x + 32 * i, inverse[i]);
        else
            memset(to[i].q, 0, sizeof to[i].q);
    for (int64_t i = 0; i < count; ++i) {
        const float in_unit = d[i] * (1 / UNIT);
        to[i].d = to_half_precision(in_unit);
        to[i].s = to_half_precision(in_unit * sums[i]);
    }
}

// Quantizes x [32 * count] to blocks. The caller has set the rounding mode.
void qgemm_quantize_blocks(void* blocks, const float* x, int64_t count) {
    for (int64_t i = 0; i < count; i += EIGHT_BLOCKS)
        quantize((activations*)blocks + i, x + 32 * i, count - i < EIGHT_BLOCKS ? count - i : EIGHT_BLOCKS);
}

// Quantizes the blocks of one group of a row.
static void quantize_group(grouped* to, const float* x, int64_t blocks) {
    int32_t max_bits = 0;
    for (int64_t b = 0; b < blocks; ++b) {
        const int32_t bits = float_bits(largest_magnitude(x + 32 * b));
        max_bits = bits > max_bits ? bits : max_bits;
    }
    const float largest = bits_float(max_bits);
    const int nonzero = is_finite(largest) && largest >= LEAST_EIGHT_BITS;
    const float d = !is_finite(largest) ? __builtin_nanf("")
                    : nonzero           ? largest / 127
                                        : 0,
                inverse = nonzero ? 127 / largest : 0;
    for (int64_t b = 0; b < blocks; ++b) {
        to[b].d = d;
        if (nonzero)
            store_codes(to[b].q, x + 32 * b, inverse);
        else
            memset(to[b].q, 0, sizeof to[b].q);
    }
}

// Quantizes rows first to last - 1 of x: one thread's share.
void qgemm_quantize_groups(const void* argument, int64_t first, int64_t last) {
    const rows_of_x* p = argument;
    const int64_t blocks = p->k / 32, group_blocks = p->group / 32;
    const uint64_t mode = enter_ieee_mode();
    for (int64_t row = first; row < last; ++row)
        for (int64_t b = 0; b < blocks; b += group_blocks)
            quantize_group((grouped*)p->blocks + row * blocks + b, (const float*)p->x + row * p->k + 32 * b,
                           blocks - b < group_blocks ? blocks - b : group_blocks);
    restore_mode(mode);
}

// Quantizes blocks first to last - 1: one thread's share.
void qgemm_quantize(const void* argument, int64_t first, int64_t last) {
    const quantization* p = argument;
    const uint64_t mode = enter_ieee_mode();
    qgemm_quantize_blocks((activations*)p->blocks + first, (const float*)p->x + 32 * first, last - first);
    restore_mode(mode);
}
