// Encodes blocks of types whose codes follow from the largest magnitude or the range, without a search: the bytes of
// the modules of qgemm/formats/, which have the formulas and layouts. A call encodes one block after the other; loops
// run over a block's weights.
//
// An encoder returns whether NumPy must check the block, because a scale or a value may not be finite or may exceed its
// limit.
//
// Macro: BLOCKS_FIELDS, the fields of the job (qgemm/cpu/native/encoders.py).
#include "../extremes.h"

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
typedef struct {
    uint8_t qs[48], qh[4];
    uint16_t d;
} tq1_0;
typedef struct {
    uint8_t qs[64];
    uint16_t d;
} tq2_0;
typedef struct {
    uint16_t d;
    uint8_t qs[16];
} q1_0;

// Whether a half is infinite or NaN.
INLINE int not_finite_half(uint16_t half) { return (half & 0x7c00) == 0x7c00; }

// Packs codes of 32 weights: the low four bits into qs, the fifth into qh.
INLINE void pack_nibbles(uint8_t* qs, const int32_t* codes) {
    for (int i = 0; i < 16; ++i) qs[i] = (uint8_t)((codes[i] & 15) | (codes[i + 16] & 15) << 4);
}
INLINE void pack_fifth_bits(uint8_t* qh, const int32_t* codes) {
    uint32_t bits = 0;
    for (int i = 0; i < 32; ++i) bits |= (uint32_t)(codes[i] >> 4 & 1) << i;
    memcpy(qh, &bits, sizeof bits);
}

INLINE uint16_t encode_symmetric(const float* x, int zero, int32_t* codes) {
    const float d = signed_absmax(x, 32) / (float)-zero, inverse = reciprocal(d);
    for (int i = 0; i < 32; ++i) codes[i] = truncate_to_code(x[i] * inverse + ((float)zero + 0.5f), 2 * zero - 1);
    return float_to_half(d);
}

INLINE uint16_t encode_affine(const float* x, int max_code, int32_t* codes, uint16_t* m) {
    float least, greatest;
    find_range(x, 32, &least, &greatest);
    const float d = (greatest - least) / (float)max_code, inverse = reciprocal(d);
    for (int i = 0; i < 32; ++i) codes[i] = truncate_to_code((x[i] - least) * inverse + 0.5f, max_code);
    *m = float_to_half(least);
    return float_to_half(d);
}

static int encode_q4_0(q4_0* to, const float* x) {
    int32_t codes[32];
    to->d = encode_symmetric(x, 8, codes);
    pack_nibbles(to->qs, codes);
    return not_finite_half(to->d);
}

static int encode_q5_0(q5_0* to, const float* x) {
    int32_t codes[32];
    to->d = encode_symmetric(x, 16, codes);
    pack_nibbles(to->qs, codes);
    pack_fifth_bits(to->qh, codes);
    return not_finite_half(to->d);
}

static int encode_q4_1(q4_1* to, const float* x) {
    int32_t codes[32];
    to->d = encode_affine(x, 15, codes, &to->m);
    pack_nibbles(to->qs, codes);
    return not_finite_half(to->d) | not_finite_half(to->m);
}

static int encode_q5_1(q5_1* to, const float* x) {
    int32_t codes[32];
    to->d = encode_affine(x, 31, codes, &to->m);
    pack_nibbles(to->qs, codes);
    pack_fifth_bits(to->qh, codes);
    return not_finite_half(to->d) | not_finite_half(to->m);
}

static int encode_q8_0(q8_0* to, const float* x) {
    const float d = absmax(x, 32) / 127, inverse = reciprocal(d);
    to->d = float_to_half(d);
    for (int i = 0; i < 32; ++i) to->qs[i] = (int8_t)truncate_to_code(add_half_away(x[i] * inverse), 127);
    return not_finite_half(to->d);
}

// Codes 0, 1, 2 for -d, 0, d with d the largest magnitude. A weight whose quotient by a subnormal d is not finite gets
// the code `lost`.
INLINE uint16_t encode_ternary(const float* x, int size, uint8_t* codes, uint8_t lost) {
    const float d = absmax(x, size), inverse = reciprocal(d);
    for (int i = 0; i < size; ++i) {
        const float scaled = x[i] * inverse;
        codes[i] = fabsf(scaled) <= 3.4028234e38f ? (uint8_t)(truncate_to_code(add_half_away(scaled), 1) + 1) : lost;
    }
    return float_to_half(d);
}

static int encode_q2_0(q2_0* to, const float* x) {
    uint8_t codes[64];
    to->d = encode_ternary(x, 64, codes, 0);
    for (int i = 0; i < 16; ++i)
        to->qs[i] = (uint8_t)(codes[4 * i] | codes[4 * i + 1] << 2 | codes[4 * i + 2] << 4 | codes[4 * i + 3] << 6);
    return not_finite_half(to->d);
}

static int encode_tq2_0(tq2_0* to, const float* x) {
    uint8_t codes[256];
    to->d = encode_ternary(x, 256, codes, 1);
    for (int half = 0; half < 2; ++half)
        for (int j = 0; j < 32; ++j) {
            const uint8_t* quad = codes + 128 * half + j;
            to->qs[32 * half + j] = (uint8_t)(quad[0] | quad[32] << 2 | quad[64] << 4 | quad[96] << 6);
        }
    return not_finite_half(to->d);
}

// Bytes ceil(256 / 243 * number) of numbers in base 3, whose digits are `size` codes apart, the highest first.
INLINE void pack_digits(uint8_t* to, const uint8_t* codes, int size, int digits) {
    for (int j = 0; j < size; ++j) {
        uint32_t number = 0;
        for (int i = 0; i < 5; ++i) number = 3 * number + (i < digits ? codes[size * i + j] : 0);
        to[j] = (uint8_t)((256 * number + 242) / 243);
    }
}

static int encode_tq1_0(tq1_0* to, const float* x) {
    uint8_t codes[256];
    to->d = encode_ternary(x, 256, codes, 1);
    pack_digits(to->qs, codes, 32, 5);
    pack_digits(to->qs + 32, codes + 160, 16, 5);
    pack_digits(to->qh, codes + 240, 4, 4);
    return not_finite_half(to->d);
}

// Gathers bit `plane` of eight bytes into one byte.
INLINE uint8_t gather_bits(const uint8_t* from, int plane) {
    uint64_t eight;
    memcpy(&eight, from, sizeof eight);
    return (uint8_t)((eight >> plane & 0x0101010101010101) * 0x0102040810204080 >> 56);
}

static int encode_q1_0(q1_0* to, const float* x) {
    uint8_t codes[128];
    float sum = 0;
    for (int i = 0; i < 128; ++i) sum += fabsf(x[i]);
    for (int i = 0; i < 128; ++i) codes[i] = x[i] >= 0;
    to->d = float_to_half(sum / 128);
    for (int i = 0; i < 16; ++i) to->qs[i] = gather_bits(codes + 8 * i, 0);
    return not_finite_half(to->d);
}

static const float MAGNITUDES[8] = {0, 1, 2, 3, 4, 6, 8, 12};  // twice the magnitudes of e2m1

// floor(log2(largest)) - 2 + 127 in eight bits; 0 for zero, infinity and NaN. The logarithm is C's log2f: within half a
// float spacing h below an integer n it rounds to n, and log2(v) >= n - h means v >= 2^n * 2^-h.
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

static int encode_mxfp4(mxfp4* to, const float* x) {
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
    return !is_finite(absmax(x, 32));
}

// Rounds a scale >= 0 to UE4M3, to nearest with ties up; values that would round to 256 or more become 448.
static uint8_t encode_ue4m3(float scale) {
    enum { BIAS = 127 - 7, MOST = 0x7e };
    if (!(scale > 0)) return 0;
    const int32_t bits = float_bits(scale < 448 ? scale : 448), exponent = (bits >> 23) - BIAS;
    if (exponent <= 0) {
        const int32_t nearest = (int32_t)(scale * 512 + 0.5f);
        return (uint8_t)(nearest < 7 ? nearest : 7);
    }
    const int32_t rounded_up = ((bits >> 19) + 1 >> 1) - (BIAS << 3);
    return (uint8_t)(rounded_up >= 15 << 3 ? MOST : rounded_up);
}

static float decode_half_ue4m3(uint8_t byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    return exponent ? (float)(8 + mantissa) * power_of_two(exponent - 11) : (float)mantissa * 0x1p-10f;
}

static int encode_nvfp4(nvfp4* to, const float* x) {
    const int refused = !is_finite(absmax(x, 64));
    for (int g = 0; g < 4; ++g, x += 16) {
        uint8_t codes[16];
        float least[16];
        to->d[g] = encode_ue4m3(absmax(x, 16) / 6);
        const float unit = decode_half_ue4m3(to->d[g]);
        int32_t nearest[16] = {0};
        for (int i = 0; i < 16; ++i) least[i] = fabsf(x[i]);
        for (int code = 1; code < 8; ++code) {
            const float level = unit * MAGNITUDES[code];
            for (int i = 0; i < 16; ++i) {
                const float error = fabsf(level - fabsf(x[i]));
                nearest[i] = error < least[i] ? code : nearest[i];
                least[i] = error < least[i] ? error : least[i];
            }
        }
        for (int i = 0; i < 16; ++i) codes[i] = (uint8_t)(nearest[i] + ((x[i] < 0) & (nearest[i] > 0)) * 8);
        for (int i = 0; i < 8; ++i) to->qs[8 * g + i] = (uint8_t)(codes[i] | codes[i + 8] << 4);
    }
    return refused;
}

// Rounds a magnitude to E4M4, to nearest with ties to even; 31 for larger values and for NaN.
static uint8_t encode_e4m4(float magnitude) {
    if (!(magnitude < 31)) return 255;
    if (magnitude < 0x1p-10f) return (uint8_t)__builtin_rintf(magnitude * 0x1p14f);
    const int32_t bits = float_bits(magnitude), rounded = (bits + 0x3ffff + (bits >> 19 & 1)) >> 19;
    return (uint8_t)(rounded - (116 << 4));
}

// Encodes a block of kbit: its absmax, then bit planes of the codes. p: the codebook and the layout of blocks.
static int encode_kbit(uint8_t* to, const float* x, const job* p) {
    enum { LEAST_BITS = 0x322bcc77 };  // bits of 1e-8, the least divisor
    const float largest = absmax(x, 32), divisor = float_bits(largest) > LEAST_BITS ? largest : bits_float(LEAST_BITS);
    const f32x16 low = load_floats(p->edges), high = load_floats((const float*)p->edges + 16);
    uint8_t codes[32];
    for (int start = 0; start < 32; start += 16) {
        f32x16 scaled = load_floats(x + start);
        EACH_PART scaled.part[i] /= all_floats(divisor).part[i];
        i32x16 below = {{{0}}};  // number of edges below x, by bisection
        for (int half = 1 << (p->planes - 1); half; half >>= 1) {
            const i32x16 last = add_ints(below, all_ints(half - 1));
            const f32x16 edge = p->planes > 4 ? permute_two_tables(low, high, last) : permute(low, last);
            EACH_PART below.part[i] += (scaled.part[i] > edge.part[i]) & half;
        }
        int32_t numbers[16];
        store_ints(numbers, below);
        for (int i = 0; i < 16; ++i) codes[start + i] = (uint8_t)numbers[i];
    }
    const uint8_t* order = p->codes;
    for (int i = 0; order && i < 32; ++i) codes[i] = order[codes[i]];
    const uint16_t half = float_to_half(largest);
    const uint8_t e4m4 = encode_e4m4(largest);
    if (p->absmax_bytes == sizeof half)
        memcpy(to, &half, sizeof half);
    else if (p->absmax_bytes == sizeof e4m4)
        *to = e4m4;
    else
        memcpy(to, &largest, sizeof largest);
    to += p->absmax_bytes;
    for (int plane = 0; plane < p->planes; ++plane)
        for (int i = 0; i < 4; ++i) *to++ = gather_bits(codes + 8 * i, plane);
    return !(largest < p->limit) | (p->absmax_bytes == sizeof half && not_finite_half(half));
}

#include "group_blocks.h"

// Encodes blocks first to last - 1 of x [n, weights of a block]: one thread's share.
#define EXPORT(name, size, weights, more)                                                                          \
    void qgemm_encode_##name(const void* argument, int64_t first, int64_t last) {                                  \
        const job* p = argument;                                                                                   \
        const uint64_t mode = enter_ieee_mode();                                                                   \
        int refused = 0;                                                                                           \
        for (int64_t i = first; i < last; ++i)                                                                     \
            refused |=                                                                                             \
                encode_##name((void*)((uint8_t*)p->blocks + i * (size)), (const float*)p->x + (weights) * i more); \
        restore_mode(mode);                                                                                        \
        if (refused) *(_Atomic int32_t*)p->refused = 1;                                                            \
    }
#define EXPORT_BLOCKS(type, weights) EXPORT(type, (int64_t)sizeof(type), weights, )
#define AND_JOB , p
EXPORT_BLOCKS(q4_0, 32)
EXPORT_BLOCKS(q4_1, 32)
EXPORT_BLOCKS(q5_0, 32)
EXPORT_BLOCKS(q5_1, 32)
EXPORT_BLOCKS(q8_0, 32)
EXPORT_BLOCKS(q1_0, 128)
EXPORT_BLOCKS(q2_0, 64)
EXPORT_BLOCKS(tq1_0, 256)
EXPORT_BLOCKS(tq2_0, 256)
EXPORT_BLOCKS(mxfp4, 32)
EXPORT_BLOCKS(nvfp4, 64)
EXPORT(kbit, p->absmax_bytes + 4 * p->planes, 32, AND_JOB)
EXPORT(groups, p->block_bytes, p->group_weights, AND_JOB)
