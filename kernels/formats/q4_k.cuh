// q4_k:  w = d * sc * q - dmin * m,  q in 0..15, sc and m in 0..63 a group of 32.
// Twin of qgemm/formats/q4_k.py.
#pragma once

#include "../six_bits.cuh"

template <int M16_TILES>
struct q4_k : SixBitScales<q4_k_fields<M16_TILES>> {
    using Codes = q4_k_codes;
    static constexpr int ZERO = 0;
    static constexpr bool HAS_MINIMUM = true;

    static __device__ Fragment fragment(const Codes& codes, int step) { return nibble_fragment(codes.qs[step], ZERO); }
    // Codes above -CODE_BIAS as halves, times 2^-CODE_EXPONENT.
    static constexpr int CODE_BIAS = ZERO, CODE_EXPONENT = 24, HIGH_ROW_SHIFT = 4;
    static __device__ Fragment codes_f16(const Codes& codes, int step) { return nibbles_f16(codes.qs[step]); }
    static __device__ Bytes bytes(const Codes& codes, int step) { return nibble_bytes(codes.qs[step]); }
};
