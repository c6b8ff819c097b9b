// q4_k:  w = d * sc * q - dmin * m,  q in 0..15, sc and m in 0..63 a group of 32.
// Twin of qgemm/formats/q4_k.py.
#pragma once

#include "../six_bits.cuh"

template <int GROUPS>
struct q4_k : q4_k_fields<GROUPS> {
    using Codes = q4_k_codes;
    static constexpr int ZERO = 0;
    static constexpr bool HAS_MINIMUM = true;

    static __device__ Fragment fragment(const Codes& codes, int step) { return nibble_fragment(codes.qs[step], ZERO); }
    // Codes above -RAW_ZERO as halves, times 2^-RAW_EXPONENT.
    static constexpr int RAW_ZERO = ZERO, RAW_EXPONENT = 24, RAW_SHIFT = 4;
    static __device__ Fragment raw(const Codes& codes, int step) { return raw_nibbles(codes.qs[step]); }
    static __device__ Bytes bytes(const Codes& codes, int step) { return nibble_bytes(codes.qs[step]); }
    __device__ float2 scale(int group, int g, int index) const {
        return multiply_rounded(row_pair(this->d[group][g][0]), six_bit_scales(this->scales[group][g][0], index));
    }
    __device__ float2 minimum(int group, int g, int index) const {
        return multiply_rounded(super_minimum(group, g), six_bit_minimums(this->scales[group][g][0], index));
    }
    __device__ float2 super_minimum(int group, int g) const {
        const float2 dmin = row_pair(this->dmin[group][g][0]);
        return {-dmin.x, -dmin.y};
    }
    __device__ void sub_minimums(u32 (&pairs)[2], int group, int g, int pair) const {
        six_bit_minimum_pairs(pairs, this->scales[group][g][0], pair);
    }
};
