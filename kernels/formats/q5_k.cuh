// q5_k:  w = d * sc * q - dmin * m,  q in 0..31, sc and m in 0..63 a group of 32.
// Twin of qgemm/formats/q5_k.py.
#pragma once

#include "../six_bits.cuh"

template <int GROUPS>
struct q5_k : SixBitScales<q5_k_fields<GROUPS>> {
    using Codes = q5_k_codes;
    static constexpr int ZERO = 0;
    static constexpr bool HAS_MINIMUM = true;

    static __device__ Fragment fragment(const Codes& codes, int step) {
        return five_bit_fragment(codes.qs[step], codes.qh[0], step, ZERO);
    }
    // Codes above -RAW_ZERO as halves, times 2^-RAW_EXPONENT.
    static constexpr int RAW_ZERO = ZERO, RAW_EXPONENT = 24, RAW_SHIFT = 4;
    static __device__ Fragment raw(const Codes& codes, int step) {
        return raw_five_bits(codes.qs[step], codes.qh[0], step);
    }
    static __device__ Bytes bytes(const Codes& codes, int step) {
        return five_bit_bytes(codes.qs[step], codes.qh[0], step);
    }
};
