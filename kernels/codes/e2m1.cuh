// Codes of four bits that are e2m1 numbers. Levels v are twice the numbers: 0, 1, 2, 3, 4, 6, 8, 12 and negative.
// Twin of to_tile and from_tile in qgemm/formats/mxfp4.py.
#pragma once

#include "fragment.cuh"

namespace qgemm {

// A word of a tile -> v / 2^15 of its eight codes as halves; qgemm/formats/mxfp4.py has their layout.
__device__ inline Fragment e2m1_f16(u32 word) {
    constexpr u32 MASK = 0x8e008e00;
    const u32 shared = word >> 3;
    return as_fragment(word << 9 & MASK, word << 6 & MASK, (word << 2 ^ shared) & MASK, (word ^ shared) & MASK);
}

// Words of nibbles of a block <-> words of a tile.
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

// The levels v as halves. Adding 0 turns the -0 of code 8 into the 0 of the format's table.
__device__ inline Fragment e2m1_fragment(u32 word) {
    Fragment levels = e2m1_f16(word);
    for (half2& pair : levels.a) pair = e2m1_level(pair, 0);
    return levels;
}

// The levels v as bytes: the lower bytes of the halves 1536 + v, since the last place of 1536, 0x6600, is 1.
__device__ inline Bytes e2m1_bytes(u32 word) {
    Fragment levels = e2m1_f16(word);
    for (half2& pair : levels.a) pair = e2m1_level(pair, 1536);
    const u32(&a)[4] = reinterpret_cast<const u32(&)[4]>(levels.a);
    return {__byte_perm(a[0], a[2], 0x6240), __byte_perm(a[1], a[3], 0x6240)};
}

// w = scale * v; bytes() are levels.
template <class Fields>
struct E2m1 : Fields {
    using Codes = typename Fields::Codes;
    static_assert(code_bits_are<Codes>(4), "E2m1: a field of four-bit codes");
    static constexpr int ZERO = 0;

    static __device__ void to_tile(Codes& codes) {
        for (u32& word : codes.low) word = e2m1_to_tile(word);
    }
    static __device__ void from_tile(Codes& codes) {
        for (u32& word : codes.low) word = e2m1_from_tile(word);
    }
    static __device__ Fragment fragment(const Codes& codes, int step) { return e2m1_fragment(codes.low[step]); }
    // codes_f16 are v / 2^15: masked bits without further decoding.
    static constexpr int CODE_BIAS = 0, CODE_EXPONENT = Fields::LEVEL_EXPONENT, HIGH_ROW_SHIFT = 0;
    static __device__ Fragment codes_f16(const Codes& codes, int step) { return e2m1_f16(codes.low[step]); }
    // The half 1 + (16 + v) / 2^10 has the bits of the bf16 (144 + v) / 2^14: one multiply-add, and no shift.
    static constexpr int BF16_BIAS = 144, BF16_EXPONENT = 14;
    static __device__ Fragment codes_bf16(const Codes& codes, int step) {
        Fragment f = codes_f16(codes, step);
#pragma unroll
        for (half2& pair : f.a) pair = __hfma2(pair, __float2half2_rn(32), __float2half2_rn(1 + 16 * two_to(-10)));
        return f;
    }
    static __device__ Bytes bytes(const Codes& codes, int step) { return e2m1_bytes(codes.low[step]); }
};

}  // namespace qgemm
