// mxfp4:  w = 2^(e - 128) * v,  v twice the e2m1 number: 0, 1, 2, 3, 4, 6, 8, 12 and negative.
// Twin of qgemm/formats/mxfp4.py.
#pragma once

#include "codes/encoder.cuh"
#include "fragment.cuh"
#include "tiles/mxfp4.cuh"

namespace qgemm {

// v / 2^15 as halves, of eight codes in a word of a tile: qgemm/formats/mxfp4.py says how they lie there.
__device__ inline Fragment e2m1_f16(u32 word) {
    constexpr u32 MASK = 0x8e008e00;
    const u32 shared = word >> 3;
    return as_fragment(word << 9 & MASK, word << 6 & MASK, (word << 2 ^ shared) & MASK, (word ^ shared) & MASK);
}

// Those words from nibbles, and back.
__device__ inline u32 e2m1_to_tile(u32 nibbles) {
    u32 w = (nibbles & 0x90079007) | (nibbles >> 1 & 0x01b801b8) | (nibbles << 2 & 0x22002200) |
            (nibbles << 3 & 0x00400040) | (nibbles >> 3 & 0x0c000c00) | (nibbles << 4 & 0x40004000);
    w = w ^ (w << 3 & 0x10001000) ^ (w << 5 & 0x40004000) ^ (w >> 3 & 0x80008000) ^ (w >> 5 & 0x20002000);
    return w ^ (w >> 3 & 0x0c000c00) ^ (w >> 5 & 0x01800180);
}
__device__ inline u32 e2m1_from_tile(u32 word) {
    const Fragment halves = e2m1_f16(word);
    u32 nibbles = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 a = *reinterpret_cast<const u32*>(&halves.a[i]);
        nibbles |= ((a >> 9 & 0x00070007) | (a >> 12 & 0x00080008)) << 4 * i;
    }
    return nibbles;
}

// Two halves v / 2^15 -> v + bias.
__device__ inline half2 e2m1_level(half2 code, float bias) {
    return __hfma2(code, __float2half2_rn(32768.0f), __float2half2_rn(bias));
}

// v itself. Adding 0 makes the -0 of code 8 a 0, as it is in the table.
__device__ inline Fragment e2m1_fragment(u32 word) {
    Fragment levels = e2m1_f16(word);
    for (half2& pair : levels.a) pair = e2m1_level(pair, 0);
    return levels;
}

// The same as bytes, the lower ones of 1536 + v: of the half 1536, 0x6600, the last place is 1.
__device__ inline Bytes e2m1_bytes(u32 word) {
    Fragment levels = e2m1_f16(word);
    for (half2& pair : levels.a) pair = e2m1_level(pair, 1536);
    const u32(&a)[4] = reinterpret_cast<const u32(&)[4]>(levels.a);
    return {__byte_perm(a[0], a[2], 0x6240), __byte_perm(a[1], a[3], 0x6240)};
}

// 2^(e - 128). Of e = 0 and 1 it is subnormal, 2^21 and 2^22 as bits, and the second line lies above the first.
__device__ inline float power_of_two(int e) {
    return __int_as_float(max((e << 23) - (1 << 23), (e << 21) + (1 << 21)));
}

// floor(log2(largest)) - 2 + 127, 0 for zero, from the logarithm rounded to float: that is the next whole number's from
// at most 91 places of a float below a power of two.
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

template <int M16_TILES>
struct mxfp4 : mxfp4_fields<M16_TILES> {
    using Codes = mxfp4_codes;
    static constexpr int ZERO = 0;
    static constexpr bool HAS_MINIMUM = false;
    using Encoder = mxfp4_encoder;

    static __device__ void to_tile(Codes& codes) {
        for (u32& word : codes.qs) word = e2m1_to_tile(word);
    }
    static __device__ void from_tile(Codes& codes) {
        for (u32& word : codes.qs) word = e2m1_from_tile(word);
    }
    static __device__ Fragment fragment(const Codes& codes, int step) { return e2m1_fragment(codes.qs[step]); }
    // v / 2^15, as the bits stand.
    static constexpr int CODE_BIAS = 0, CODE_EXPONENT = mxfp4_fields<M16_TILES>::LEVEL_EXPONENT, HIGH_ROW_SHIFT = 0;
    static __device__ Fragment codes_f16(const Codes& codes, int step) { return e2m1_f16(codes.qs[step]); }
    static __device__ Bytes bytes(const Codes& codes, int step) { return e2m1_bytes(codes.qs[step]); }
    __device__ float2 scale(int m16, int g, int block) const {
        const u32 e = *reinterpret_cast<const u32*>(this->e[m16][g]);  // of both blocks
        return {power_of_two(e >> 16 * block & 0xff), power_of_two(e >> (16 * block + 8) & 0xff)};
    }
    __device__ float2 minimum(int, int, int) const { return {}; }
};

}  // namespace qgemm
