// The 6-bit scales and minimums of q4_k and q5_k: 12 bytes for 8 groups of 32 weights, laid out as in
// qgemm/formats/q4_k.py.
#pragma once

#include "types.cuh"

__device__ inline float six_bit_scale(const u8 (&s)[12], int i) {
    return float(i < 4 ? s[i] & 63 : (s[i + 4] & 15) | (s[i - 4] >> 6 << 4));
}

__device__ inline float six_bit_minimum(const u8 (&s)[12], int i) {
    return float(i < 4 ? s[i + 4] & 63 : s[i + 4] >> 4 | (s[i] >> 6 << 4));
}

// part * d of rows g and g + 8, rounded as ggml and NumPy round it.
__device__ inline float2 scaled(const half (&d)[2], float low, float high) {
    return {__fmul_rn(__half2float(d[0]), low), __fmul_rn(__half2float(d[1]), high)};
}
