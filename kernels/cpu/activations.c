// x -> blocks of activations as NumPy makes them, bit for bit: qgemm/codec/activations.py, group_activations.py.
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

// Of "a8_g128": GROUP_OF_G128 numbers share d, the last of a row perhaps fewer.
typedef struct {
    float d;
    int8_t q[32];
} g128;

// Rows of x [n, k] and blocks [n, k / 32].
typedef struct {
    ROWS_FIELDS
} rows_of_x;

_Static_assert(sizeof(g128) == G128_BYTES, "activations of groups differ from their dtype");

// Rounded to 11 bits by Veltkamp's splitting; NaN and infinity become NaN.
static float to_half_precision(float value) {
    const float above = value * 8193;
    return above + (value - above);
}

static void quantize(activations* to, const float* x) {
    const float largest = absmax(x, 32), d = largest / 127, inverse = reciprocal(d);
    int32_t codes[32] = {0}, sum = 0;
    if (is_finite(largest) && inverse <= 3.4028234e38f)  // else no product with it is finite, which gives 0
        for (int i = 0; i < 32; ++i) codes[i] = (int32_t)away_from_0(x[i] * inverse);
    for (int i = 0; i < 32; ++i) sum += codes[i], to->q[i] = (int8_t)codes[i];
    const float in_unit = d * (1 / UNIT);
    to->d = to_half_precision(in_unit);
    to->s = to_half_precision(in_unit * (float)sum);
}

// x [32 count] -> blocks, in the mode of the caller's arithmetic.
void qgemm_quantize_blocks(void* blocks, const float* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) quantize((activations*)blocks + i, x + 32 * i);
}

// Some blocks of a row, of one group.
static void quantize_group(g128* to, const float* x, int64_t blocks) {
    int32_t most = 0;
    for (int64_t b = 0; b < blocks; ++b) {
        const int32_t of_block = float_bits(absmax(x + 32 * b, 32));
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
        for (int i = 0; i < 32; ++i) to[b].q[i] = (int8_t)(some ? (int32_t)away_from_0(x[32 * b + i] * inverse) : 0);
    }
}

// Rows first .. last - 1: what a thread does.
void qgemm_quantize_g128(const void* argument, int64_t first, int64_t last) {
    const rows_of_x* p = argument;
    const int64_t blocks = p->k / 32, of_group = GROUP_OF_G128 / 32;
    const uint64_t mode = ieee_mode();
    for (int64_t row = first; row < last; ++row)
        for (int64_t b = 0; b < blocks; b += of_group)
            quantize_group((g128*)p->blocks + row * blocks + b, (const float*)p->x + row * p->k + 32 * b,
                           blocks - b < of_group ? blocks - b : of_group);
    restore_mode(mode);
}

// Blocks first .. last - 1: what a thread does.
void qgemm_quantize(const void* argument, int64_t first, int64_t last) {
    const quantization* p = argument;
    const uint64_t mode = ieee_mode();
    for (int64_t i = first; i < last; ++i) quantize((activations*)p->blocks + i, (const float*)p->x + 32 * i);
    restore_mode(mode);
}
