// Blocks of types whose codes follow from the largest magnitude or the range, without a search: byte for byte those of the
// modules of qgemm/formats/, which have the formulas and layouts on top. A block at a time; loops run over its weights.
#include <math.h>

#include "../numbers.h"

typedef struct {
    BLOCKS_FIELDS
} job;

typedef struct {
    uint16_t d;
    uint8_t qs[16];
} q4_0;
typedef struct {
    uint16_t d, m;
    uint8_t qs[16];
} q4_1;
typedef struct {
    uint16_t d;
    uint8_t qh[4], qs[16];
} q5_0;
typedef struct {
    uint16_t d, m;
    uint8_t qh[4], qs[16];
} q5_1;
typedef struct {
    uint16_t d;
    int8_t qs[32];
} q8_0;
typedef struct {
    uint8_t e, qs[16];
} mxfp4;
typedef struct {
    uint8_t d[4], qs[32];
} nvfp4;
typedef struct {
    uint16_t d;
    uint8_t qs[16];
} q2_0;

// The bits of a float without its sign: they compare like magnitudes, NaN above all.
INLINE int32_t float_bits(float value) {
    int32_t found;
    memcpy(&found, &value, sizeof found);
    return found;
}
INLINE float bits_float(int32_t bits) {
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

INLINE float absmax(const float* x, int size) {
    int32_t most = 0;
    for (int i = 0; i < size; ++i) {
        const int32_t magnitude = float_bits(x[i]) & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    return bits_float(most);
}

INLINE float reciprocal(float d) { return d == 0 ? 0 : 1 / d; }

// Toward zero, at most `most`; 0 for what is not finite or beyond an integer, as x86 converts and NumPy's codec has it.
INLINE int32_t code_of(float value, int32_t most) {
    const int32_t found = fabsf(value) < 2147483648.0f ? (int32_t)value : 0;
    return found > most ? most : found;
}

INLINE float first_zero_or(float value, const float* x, int size) {
    for (int i = 0; value == 0 && i < size; ++i)
        if (x[i] == 0) return x[i];
    return value;
}

// A float's bits as an integer in the order of the floats, and back.
INLINE int32_t in_order(int32_t bits) { return bits ^ (bits >> 31 & 0x7fffffff); }

// The least and the greatest value, the first of -0 and +0.
INLINE void range_of(const float* x, int size, float* least, float* greatest) {
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (int i = 0; i < size; ++i) {
        const int32_t number = in_order(float_bits(x[i]));
        low = number < low ? number : low;
        high = number > high ? number : high;
    }
    *least = first_zero_or(bits_float(in_order(low)), x, size);
    *greatest = first_zero_or(bits_float(in_order(high)), x, size);
}

// The value of largest magnitude, the first of several; +0 if all are zero.
INLINE float signed_absmax(const float* x, int size) {
    const int32_t most = float_bits(absmax(x, size));
    int32_t first = size - 1;
    for (int i = 0; i < size; ++i) {
        const int32_t at = (float_bits(x[i]) & 0x7fffffff) == most ? i : size - 1;
        first = at < first ? at : first;
    }
    return most ? x[first] : 0;
}

// Codes of 32 weights: their low four bits in qs, the fifth in qh.
INLINE void pack_low(uint8_t* qs, const int32_t* codes) {
    for (int i = 0; i < 16; ++i) qs[i] = (uint8_t)((codes[i] & 15) | (codes[i + 16] & 15) << 4);
}
INLINE void pack_fifth(uint8_t* qh, const int32_t* codes) {
    uint32_t bits = 0;
    for (int i = 0; i < 32; ++i) bits |= (uint32_t)(codes[i] >> 4 & 1) << i;
    memcpy(qh, &bits, sizeof bits);
}

INLINE uint16_t symmetric(const float* x, int zero, int32_t* codes) {
    const float d = signed_absmax(x, 32) / (float)-zero, inverse = reciprocal(d);
    for (int i = 0; i < 32; ++i) codes[i] = code_of(x[i] * inverse + ((float)zero + 0.5f), 2 * zero - 1);
    return float_to_half(d);
}

INLINE uint16_t affine(const float* x, int most, int32_t* codes, uint16_t* m) {
    float least, greatest;
    range_of(x, 32, &least, &greatest);
    const float d = (greatest - least) / (float)most, inverse = reciprocal(d);
    for (int i = 0; i < 32; ++i) codes[i] = code_of((x[i] - least) * inverse + 0.5f, most);
    *m = float_to_half(least);
    return float_to_half(d);
}

static void encode_q4_0(q4_0* to, const float* x) {
    int32_t codes[32];
    to->d = symmetric(x, 8, codes);
    pack_low(to->qs, codes);
}

static void encode_q5_0(q5_0* to, const float* x) {
    int32_t codes[32];
    to->d = symmetric(x, 16, codes);
    pack_low(to->qs, codes);
    pack_fifth(to->qh, codes);
}

static void encode_q4_1(q4_1* to, const float* x) {
    int32_t codes[32];
    to->d = affine(x, 15, codes, &to->m);
    pack_low(to->qs, codes);
}

static void encode_q5_1(q5_1* to, const float* x) {
    int32_t codes[32];
    to->d = affine(x, 31, codes, &to->m);
    pack_low(to->qs, codes);
    pack_fifth(to->qh, codes);
}

// To nearest, halves away from 0: the number before 1/2 is added.
INLINE float away_from_0(float value) { return value + __builtin_copysignf(0x1.fffffep-2f, value); }

static void encode_q8_0(q8_0* to, const float* x) {
    const float d = absmax(x, 32) / 127, inverse = reciprocal(d);
    to->d = float_to_half(d);
    for (int i = 0; i < 32; ++i) to->qs[i] = (int8_t)code_of(away_from_0(x[i] * inverse), 127);
}

static void encode_q2_0(q2_0* to, const float* x) {
    const float d = absmax(x, 64), inverse = reciprocal(d);
    uint8_t codes[64];
    to->d = float_to_half(d);
    for (int i = 0; i < 64; ++i) {
        const float scaled = x[i] * inverse;
        codes[i] = fabsf(scaled) <= 3.4028234e38f ? (uint8_t)(code_of(away_from_0(scaled), 1) + 1) : 0;
    }
    for (int i = 0; i < 16; ++i)
        to->qs[i] = (uint8_t)(codes[4 * i] | codes[4 * i + 1] << 2 | codes[4 * i + 2] << 4 | codes[4 * i + 3] << 6);
}

static const float MAGNITUDES[8] = {0, 1, 2, 3, 4, 6, 8, 12};  // twice those of e2m1

// floor(log2(largest)) - 2 + 127 in eight bits, 0 for zero and what is not finite. The logarithm is that of C, rounded to
// float: less than half of a float's spacing h below a whole number n it is n, that is from n - h on, of 2^n from 2^-h on.
static uint8_t exponent_byte(float largest) {
    int32_t bits = float_bits(largest), floored;
    if (bits == 0 || bits >= 0x7f800000) return 0;
    if (bits < 0x00800000) {
        const int shift = __builtin_clz((uint32_t)bits) - 8;
        floored = -126 - shift, bits <<= shift;
    } else {
        floored = (bits >> 23) - 127;
    }
    const int32_t mantissa = (bits & 0x007fffff) | 0x00800000;
    const float whole = (float)(floored + 1);
    if (mantissa > 0x00ffff00 && whole != 0) {
        const float below = bits_float(float_bits(whole) + (whole > 0 ? -1 : 1));
        const double h = ((double)whole - (double)below) / 2 * 0.69314718055994531;
        floored += mantissa * 0x1p-24 >= 1 - h + h * h / 2;
    }
    return (uint8_t)(floored + 127 - 2);
}

static void encode_mxfp4(mxfp4* to, const float* x) {
    uint8_t codes[32];
    to->e = exponent_byte(absmax(x, 32));
    const float scale = bits_float(to->e < 2 ? 1 << (21 + to->e) : (to->e - 1) << 23);
    float edges[7];
    for (int j = 0; j < 7; ++j) edges[j] = scale * MAGNITUDES[j] / 2 + scale * MAGNITUDES[j + 1] / 2;
    for (int i = 0; i < 32; ++i) {
        const float size = fabsf(x[i]);
        int32_t code = 0;
        for (int j = 0; j < 7; ++j) code += size > edges[j];
        codes[i] = (uint8_t)(code + ((x[i] < 0) & (code > 0)) * 8);
    }
    for (int i = 0; i < 16; ++i) to->qs[i] = (uint8_t)(codes[i] | codes[i + 16] << 4);
}

// A scale from 0 on: to nearest, halves up; 448 for what becomes 256 or more.
static uint8_t ue4m3_of(float scale) {
    enum { BIAS = 127 - 7, MOST = 0x7e };
    if (!(scale > 0)) return 0;
    const int32_t bits = float_bits(scale < 448 ? scale : 448), exponent = (bits >> 23) - BIAS;
    if (exponent <= 0) {
        const int32_t found = (int32_t)(scale * 512 + 0.5f);
        return (uint8_t)(found < 7 ? found : 7);
    }
    const int32_t rounded_up = ((bits >> 19) + 1 >> 1) - (BIAS << 3);
    return (uint8_t)(rounded_up >= 15 << 3 ? MOST : rounded_up);
}

static float half_of_ue4m3(uint8_t byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    return exponent ? (float)(8 + mantissa) * power_of_two(exponent - 11) : (float)mantissa * 0x1p-10f;
}

static void encode_nvfp4(nvfp4* to, const float* x) {
    for (int g = 0; g < 4; ++g, x += 16) {
        uint8_t codes[16];
        float least[16];
        to->d[g] = ue4m3_of(absmax(x, 16) / 6);
        const float unit = half_of_ue4m3(to->d[g]);
        int32_t found[16] = {0};
        for (int i = 0; i < 16; ++i) least[i] = fabsf(x[i]);
        for (int code = 1; code < 8; ++code) {
            const float level = unit * MAGNITUDES[code];
            for (int i = 0; i < 16; ++i) {
                const float error = fabsf(level - fabsf(x[i]));
                found[i] = error < least[i] ? code : found[i];
                least[i] = error < least[i] ? error : least[i];
            }
        }
        for (int i = 0; i < 16; ++i) codes[i] = (uint8_t)(found[i] + ((x[i] < 0) & (found[i] > 0)) * 8);
        for (int i = 0; i < 8; ++i) to->qs[8 * g + i] = (uint8_t)(codes[i] | codes[i + 8] << 4);
    }
}

// x [n, weights of a block] -> blocks [n].
#define EXPORT(type, weights)                                                          \
    void qgemm_encode_##type(const job* p) {                                           \
        const float* x = p->x;                                                         \
        type* blocks = p->blocks;                                                      \
        for (int64_t i = 0; i < p->n; ++i) encode_##type(blocks + i, x + weights * i); \
    }
EXPORT(q4_0, 32)
EXPORT(q4_1, 32)
EXPORT(q5_0, 32)
EXPORT(q5_1, 32)
EXPORT(q8_0, 32)
EXPORT(q2_0, 64)
EXPORT(mxfp4, 32)
EXPORT(nvfp4, 64)
