// x -> blocks of activations as NumPy makes them, bit for bit: qgemm/codec/activations.py.
//
// Products and sums are rounded one by one here: contracted to fma they would give other bits (-ffp-contract=off).
#include <stdint.h>
#include <string.h>

#include "numbers.h"

typedef struct {
    float d, s;  // in UNIT
    int8_t q[32];
} activations;

typedef struct {
    QUANTIZATION_FIELDS
} quantization;

_Static_assert(sizeof(activations) == ACTIVATION_BYTES, "activations differ from their dtype");

// Rounded to 11 bits by Veltkamp's splitting; NaN and infinity become NaN.
static float to_half_precision(float value) {
    const float above = value * 8193;
    return above + (value - above);
}

static void quantize(activations* to, const float* x) {
    uint32_t bits[32], most = 0;
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < 32; ++i) {
        const uint32_t size = bits[i] & 0x7fffffff;  // compares like the number; NaN is above all
        most = size > most ? size : most;
    }
    float largest;
    memcpy(&largest, &most, sizeof largest);
    const float d = largest / 127, inverse = d == 0 ? 0 : 1 / d;
    int32_t codes[32] = {0}, sum = 0;
    if (most < 0x7f800000 && inverse <= 3.4028234e38f)  // else no product with it is finite, which gives 0
        for (int i = 0; i < 32; ++i) {
            const float scaled = x[i] * inverse, half = __builtin_copysignf(0x1.fffffep-2f, scaled);
            codes[i] = (int32_t)(scaled + half);  // half away from zero: the number before 1/2 is added
        }
    for (int i = 0; i < 32; ++i) sum += codes[i], to->q[i] = (int8_t)codes[i];
    const float in_unit = d * (1 / UNIT);
    to->d = to_half_precision(in_unit);
    to->s = to_half_precision(in_unit * (float)sum);
}

// x [32 count] -> blocks, in the mode of the caller's arithmetic.
void qgemm_quantize_blocks(void* blocks, const float* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) quantize((activations*)blocks + i, x + 32 * i);
}

// Blocks first .. last - 1: what a thread does.
void qgemm_quantize(const void* argument, int64_t first, int64_t last) {
    const quantization* p = argument;
    const uint64_t mode = ieee_mode();
    for (int64_t i = first; i < last; ++i) quantize((activations*)p->blocks + i, (const float*)p->x + 32 * i);
    restore_mode(mode);
}
