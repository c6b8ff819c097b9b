// The 6-bit scales and minimums of q4_k and q5_k: 12 bytes a row for 8 groups of 32 weights, laid out as in
// qgemm/formats/q4_k.py.
#pragma once

#include "fragment.cuh"

// Those of groups 2 p and 2 p + 1 of a row, a byte each.
struct SixBits {
    u32 scales, minimums;
    __device__ SixBits(const u8 (&row)[12], int p) {
        const u16* pairs = reinterpret_cast<const u16*>(row) + p % 2u;
        const u32 first = pairs[0], second = pairs[2], rest = pairs[4];
        scales = p < 2 ? first & 0x3f3f : (rest & 0x0f0f) | (first >> 2 & 0x3030);
        minimums = p < 2 ? second & 0x3f3f : (rest >> 4 & 0x0f0f) | (second >> 2 & 0x3030);
    }
};

__device__ inline float2 six_bit_scales(const u8 (&rows)[2][12], int index) {
    return byte_pair(SixBits(rows[0], index >> 1).scales, SixBits(rows[1], index >> 1).scales, index & 1, 0);
}

__device__ inline float2 six_bit_minimums(const u8 (&rows)[2][12], int index) {
    return byte_pair(SixBits(rows[0], index >> 1).minimums, SixBits(rows[1], index >> 1).minimums, index & 1, 0);
}
