// mxfp4:  w = 2^(e - 128) * v,  v twice the e2m1 number: 0, 1, 2, 3, 4, 6, 8, 12 and negative.
// Twin of qgemm/formats/mxfp4.py.
#pragma once

#include "../encoder.cuh"
#include "../fragment.cuh"

// v / 2^15 as halves, from codes whose sign stands at bit 15 of `signs` and whose other bits stand at bits 9 to 11 of
// `rest`: there they are exponent and mantissa of v / 2^15 (code 1: a subnormal).
__device__ inline half2 tiny_e2m1(u32 signs, u32 rest) { return as_half2((signs & 0x80008000) | (rest & 0x0e000e00)); }

// A word of eight codes: byte j is column j of row g (low) and of row g + 8 (high).
__device__ inline Fragment raw_e2m1(u32 word) {
    return {tiny_e2m1(word << 12, word << 9), tiny_e2m1(word << 8, word << 5), tiny_e2m1(word << 4, word << 1),
            tiny_e2m1(word, word >> 3)};
}

// v itself. Adding 0 makes the -0 of code 8 a 0, as it is in the table.
__device__ inline Fragment e2m1_fragment(u32 word) {
    Fragment levels = raw_e2m1(word);
    for (half2& pair : levels.a) pair = __hfma2(pair, __float2half2_rn(32768.0f), __float2half2_rn(0.0f));
    return levels;
}

// 0xff in every byte whose top bit is set.
__device__ inline u32 spread_signs(u32 word) { return (word >> 7 & 0x01010101) * 0xff; }

// The same as signed bytes. __byte_perm looks up what four codes stand for, once as if all were positive, once as if
// all were negative; spread over bytes, their signs choose.
__device__ inline Bytes e2m1_bytes(u32 word) {
    const u32 near = word & 0x77777777, far = near >> 16;  // __byte_perm reads the low four codes
    const u32 plus[2] = {__byte_perm(0x03020100, 0x0c080604, near), __byte_perm(0x03020100, 0x0c080604, far)};
    const u32 minus[2] = {__byte_perm(0xfdfeff00, 0xf4f8fafc, near), __byte_perm(0xfdfeff00, 0xf4f8fafc, far)};
    const u32 low = spread_signs(word << 4), high = spread_signs(word);
    return {(__byte_perm(plus[0], plus[1], 0x6420) & ~low) | (__byte_perm(minus[0], minus[1], 0x6420) & low),
            (__byte_perm(plus[0], plus[1], 0x7531) & ~high) | (__byte_perm(minus[0], minus[1], 0x7531) & high)};
}

// 2^(e - 128). Of e = 0 and 1 it is subnormal, 2^21 and 2^22 as bits, and the second line lies above the first.
__device__ inline float power_of_two(int e) {
    return __int_as_float(max((e << 23) - (1 << 23), (e << 21) + (1 << 21)));
}

// floor(log2(largest)) - 2 + 127, 0 for zero, from the logarithm rounded to float: that is the next whole number's from at
// most 91 places of a float below a power of two.
__device__ inline u8 exponent_of(float largest) {
    const u32 bits = __float_as_uint(largest);
    if (bits == 0) return 0;
    const bool near = bits < 1 << 23 || (~bits & 0x7fffff) < 128;
    return 125 + (near ? int(floorf(float(log2(double(largest))))) : int(bits >> 23) - 127);
}

struct mxfp4_encoder {
    static constexpr int MAGNITUDES[] = {0, 1, 2, 3, 4, 6, 8, 12};
    float largest;
    u8 e;
    float scale;
    float edges[7];  // between two magnitudes; the lower code of two that are equally near

    __device__ mxfp4_encoder(LaneValues x)
        : largest(__uint_as_float(largest_of_block(x))), e(exponent_of(largest)), scale(power_of_two(e)) {
        // A level beyond float is infinite and so is its edge: it is never the nearest.
#pragma unroll
        for (int j = 0; j < 7; ++j)
            edges[j] = __fadd_rn(__fmul_rn(__fmul_rn(MAGNITUDES[j], scale), 0.5f),
                                 __fmul_rn(__fmul_rn(MAGNITUDES[j + 1], scale), 0.5f));
    }
    __device__ bool holds() const { return !isinf(largest); }
    __device__ u32 code(float x) const {
        u32 code = 0;
#pragma unroll
        for (int j = 0; j < 7; ++j) code += fabsf(x) > edges[j];
        return x < 0 && code ? code + 8 : code;
    }
    __device__ float decode(u32 code) const {
        const float magnitude = float(__byte_perm(0x03020100, 0x0c080604, code & 7) & 0xff) * scale;
        return code & 8 ? -magnitude : magnitude;
    }
    __device__ void write(mxfp4_block& block, LaneCodes codes) const {
        write_nibbles(block, codes);
        if (block_lane() == 0) block.e = e;
    }
};

template <int GROUPS>
struct mxfp4 : mxfp4_fields<GROUPS> {
    using Codes = mxfp4_codes;
    static constexpr int ZERO = 0;
    static constexpr bool HAS_MINIMUM = false;
    using Encoder = mxfp4_encoder;

    static __device__ Fragment fragment(const Codes& codes, int step) { return e2m1_fragment(codes.qs[step]); }
    // v / 2^15, as the bits stand.
    static constexpr int RAW_ZERO = 0, RAW_EXPONENT = 15, RAW_SHIFT = 0;
    static __device__ Fragment raw(const Codes& codes, int step) { return raw_e2m1(codes.qs[step]); }
    static __device__ Bytes bytes(const Codes& codes, int step) { return e2m1_bytes(codes.qs[step]); }
    __device__ float2 scale(int group, int g, int block) const {
        const u32 e = *reinterpret_cast<const u32*>(this->e[group][g]);  // of both blocks
        return {power_of_two(e >> 16 * block & 0xff), power_of_two(e >> (16 * block + 8) & 0xff)};
    }
    __device__ float2 minimum(int, int, int) const { return {}; }
};
