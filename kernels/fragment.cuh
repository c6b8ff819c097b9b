// The seam between formats and kernels: one lane's share of a 16 x 16 step of W, as the tensor cores want operand A.
//
// With g = lane / 4 and t = lane % 4 a lane holds rows g and g + 8, columns 2t, 2t + 1, 2t + 8, 2t + 9 of each step.
// A format header turns the lane's code words (see qgemm/tiles.py for their order) into
//   fragment(codes, step, masks)   the levels q - zero of the eight weights, exact in half
//   bytes(codes, step)      the codes q as bytes, columns in the order 2t, 2t + 8, 2t + 1, 2t + 9: row g, row g + 8
//   scale(warp, g, block), minimum(warp, g, block)   of rows g and g + 8, for one block of the tile
// so that w = scale * level + minimum.
#pragma once

#include "types.cuh"

struct Fragment {
    half2 a[4];  // row g: a[0], a[2] (columns 2t, 2t + 1 and 2t + 8, 2t + 9); row g + 8: a[1], a[3]
};

struct Bytes {
    u32 row[2];  // rows g and g + 8, four codes each
};

__device__ inline half2 as_half2(u32 bits) { return *reinterpret_cast<half2*>(&bits); }

// Halves 1024 + q - (1024 + zero): 0x6400 is 1024 in half, whose last place is 1, so or-ing q in adds it.
__device__ inline half2 levels_from_1024(u32 bits, int zero) {
    return __hsub2(as_half2(bits | 0x64006400), __float2half2_rn(1024.0f + zero));
}

// Halves 64 + q - (64 + zero), q at bit 4: 0x5400 is 64 in half, whose bit 4 is 1.
__device__ inline half2 levels_from_64(u32 bits, int zero) {
    return __hsub2(as_half2(bits | 0x54005400), __float2half2_rn(64.0f + zero));
}

// The masks of a nibble in each half-word. Made from a value that is 0 but unknown to the compiler, which would else
// move these constants to a register before every use: a fifth of the instructions of the decode kernel.
struct Masks {
    u32 low, high;
    __device__ explicit Masks(u32 unknown_zero) : low(0x000f000f | unknown_zero), high(0x00f000f0 | unknown_zero) {}
};

// A word of eight nibbles: byte j is column j of row g (low) and of row g + 8 (high).
__device__ inline Fragment nibble_fragment(u32 word, int zero, const Masks& masks) {
    u32 high = word >> 8;
    return {levels_from_1024(word & masks.low, zero), levels_from_64(word & masks.high, zero),
            levels_from_1024(high & masks.low, zero), levels_from_64(high & masks.high, zero)};
}

__device__ inline Bytes nibble_bytes(u32 word) { return {word & 0x0f0f0f0f, (word >> 4) & 0x0f0f0f0f}; }

// Move bit `from` of every byte or half-word to bit `to`; the caller masks its neighbours away.
__device__ inline u32 move_bit(u32 word, int from, int to) {
    return from < to ? word << (to - from) : word >> (from - to);
}

// Nibbles and fifth bits: bit 2 * step + r of byte j of `fifth` is column j of row g + 8 r.
__device__ inline Fragment five_bit_fragment(u32 word, u32 fifth, int step, int zero, const Masks& masks) {
    u32 high = word >> 8;
    int low_row = 2 * step, high_row = 2 * step + 1;
    return {levels_from_1024((word & masks.low) | (move_bit(fifth, low_row, 4) & 0x00100010), zero),
            levels_from_64((word & masks.high) | (move_bit(fifth, high_row, 8) & 0x01000100), zero),
            levels_from_1024((high & masks.low) | (move_bit(fifth, low_row + 8, 4) & 0x00100010), zero),
            levels_from_64((high & masks.high) | (move_bit(fifth, high_row + 8, 8) & 0x01000100), zero)};
}

__device__ inline Bytes five_bit_bytes(u32 word, u32 fifth, int step) {
    Bytes low = nibble_bytes(word);
    return {low.row[0] | (move_bit(fifth, 2 * step, 4) & 0x10101010),
            low.row[1] | (move_bit(fifth, 2 * step + 1, 4) & 0x10101010)};
}

// Four signed bytes of one row, columns 2t, 2t + 8, 2t + 1, 2t + 9 -> halves of columns (2t, 2t + 1), (2t + 8, 2t + 9).
__device__ inline void signed_byte_levels(u32 word, half2& near, half2& far) {
    u32 biased = word ^ 0x80808080;  // q + 128
    near = levels_from_1024(__byte_perm(biased, 0, 0x4240), 128);
    far = levels_from_1024(__byte_perm(biased, 0, 0x4341), 128);
}

__device__ inline Fragment byte_fragment(u32 low_row, u32 high_row) {
    Fragment f;
    signed_byte_levels(low_row, f.a[0], f.a[2]);
    signed_byte_levels(high_row, f.a[1], f.a[3]);
    return f;
}

// A scale or minimum of rows g and g + 8.
__device__ inline float2 row_pair(const half (&pair)[2]) {
    return __half22float2(*reinterpret_cast<const half2*>(pair));
}

// w = scale * level + minimum with two roundings, as ggml and NumPy compute it: no fused multiply-add.
template <class Format>
__device__ float weight(float level, float scale, float minimum) {
    float product = __fmul_rn(scale, level);
    if constexpr (Format::HAS_MINIMUM) return __fadd_rn(product, minimum);
    return product;
}
