// x -> blocks of activations as NumPy makes them, bit for bit: qgemm/codec/q8_1_f32.py, group_activations.py.
//
// Products and sums are rounded one by one here: contracted to fma they would give other bits (-ffp-contract=off).
#include "extremes.h"

typedef struct {
    float d, s;  // in UNIT
    int8_t q[32];
} activations;

typedef struct {
    QUANTIZATION_FIELDS
} quantization;

_Static_assert(sizeof(activations) == ACTIVATION_BYTES, "activations differ from their dtype");

// Of "a8_g256": the numbers of a group share d, the last of a row perhaps fewer.
typedef struct {
    float d;
    int8_t q[32];
} grouped;

// Rows of x [n, k] and blocks [n, k / 32].
typedef struct {
    ROWS_FIELDS
} rows_of_x;

_Static_assert(sizeof(grouped) == GROUPED_BYTES, "activations of groups differ from their dtype");

enum { EIGHT_BLOCKS = 8 };

// Rounded to 11 bits by Veltkamp's splitting; NaN and infinity become NaN.
static float to_half_precision(float value) {
    const float above = value * 8193;
    return above + (value - above);
}

INLINE float largest_magnitude(const float* x) {
    const i32x16 both = larger_ints(magnitude_bits(load_ints(x)), magnitude_bits(load_ints(x + 16)));
    return bits_float(largest_of_ints(both));
}

// x * inverse of 32 numbers, to nearest, halves away from 0: their sum.
INLINE int32_t store_codes(int8_t* to, const float* x, float inverse) {
    const i32x16 low = rounded_away(mul_all(load_floats(x), inverse));
    const i32x16 high = rounded_away(mul_all(load_floats(x + 16), inverse));
    store_low_bytes(to, low), store_low_bytes(to + 16, high);
    return sum_of_ints(add_ints(low, high));
}

// EIGHT_BLOCKS or fewer, step by step: a block alone would wait for two divisions.
static void quantize(activations* to, const float* x, int64_t count) {
    float d[EIGHT_BLOCKS] = {0}, inverse[EIGHT_BLOCKS], sums[EIGHT_BLOCKS] = {0};
    for (int64_t i = 0; i < count; ++i) d[i] = largest_magnitude(x + 32 * i);
    for (int i = 0; i < EIGHT_BLOCKS; ++i) d[i] = d[i] / 127, inverse[i] = 1 / d[i];
    for (int64_t i = 0; i < count; ++i)
        if (is_finite(d[i]) && is_finite(inverse[i]))  // else no product with it is finite, or all are 0: codes are 0
            sums[i] = (float)store_codes(to[i].q, x + 32 * i, inverse[i]);
        else
            memset(to[i].q, 0, sizeof to[i].q);
    for (int64_t i = 0; i < count; ++i) {
        const float in_unit = d[i] * (1 / UNIT);
        to[i].d = to_half_precision(in_unit);
        to[i].s = to_half_precision(in_unit * sums[i]);
    }
}

// x [32 count] -> blocks, in the mode of the caller's arithmetic.
void qgemm_quantize_blocks(void* blocks, const float* x, int64_t count) {
    for (int64_t i = 0; i < count; i += EIGHT_BLOCKS)
        quantize((activations*)blocks + i, x + 32 * i, count - i < EIGHT_BLOCKS ? count - i : EIGHT_BLOCKS);
}

// Some blocks of a row, of one group.
static void quantize_group(grouped* to, const float* x, int64_t blocks) {
    int32_t most = 0;
    for (int64_t b = 0; b < blocks; ++b) {
        const int32_t of_block = float_bits(largest_magnitude(x + 32 * b));
        most = of_block > most ? of_block : most;
    }
    const float largest = bits_float(most);
    const int some = is_finite(largest) && largest >= LEAST_EIGHT_BITS;
    const float d = !is_finite(largest) ? __builtin_nanf("")
                    : some              ? largest / 127
                                        : 0,
                inverse = some ? 127 / largest : 0;
    for (int64_t b = 0; b < blocks; ++b) {
        to[b].d = d;
        if (some)
            store_codes(to[b].q, x + 32 * b, inverse);
        else
            memset(to[b].q, 0, sizeof to[b].q);
    }
}

// Rows first .. last - 1: what a thread does.
void qgemm_quantize_groups(const void* argument, int64_t first, int64_t last) {
    const rows_of_x* p = argument;
    const int64_t blocks = p->k / 32, of_group = p->group / 32;
    const uint64_t mode = ieee_mode();
    for (int64_t row = first; row < last; ++row)
        for (int64_t b = 0; b < blocks; b += of_group)
            quantize_group((grouped*)p->blocks + row * blocks + b, (const float*)p->x + row * p->k + 32 * b,
                           blocks - b < of_group ? blocks - b : of_group);
    restore_mode(mode);
}

// Blocks first .. last - 1: what a thread does.
void qgemm_quantize(const void* argument, int64_t first, int64_t last) {
    const quantization* p = argument;
    const uint64_t mode = ieee_mode();
    qgemm_quantize_blocks((activations*)p->blocks + first, (const float*)p->x + 32 * first, last - first);
    restore_mode(mode);
}
