// q4_0:  w = d * (q - 8),  q in 0..15.       Twin of qgemm/formats/q4_0.py.
#pragma once

#include "../encoder.cuh"
#include "../fragment.cuh"

template <int M16_TILES>
struct q4_0 : HalfScales<q4_0_fields<M16_TILES>> {
    using Codes = q4_0_codes;
    static constexpr int ZERO = 8;
    static constexpr bool HAS_MINIMUM = false;
    using Encoder = SymmetricEncoder<q4_0_block, ZERO>;

    static __device__ Fragment fragment(const Codes& codes, int step) { return nibble_fragment(codes.qs[step], ZERO); }
    // Codes above -CODE_BIAS as halves, times 2^-CODE_EXPONENT.
    static constexpr int CODE_BIAS = ZERO, CODE_EXPONENT = 24, HIGH_ROW_SHIFT = 4;
    static __device__ Fragment codes_f16(const Codes& codes, int step) { return nibbles_f16(codes.qs[step]); }
    static __device__ Bytes bytes(const Codes& codes, int step) { return nibble_bytes(codes.qs[step]); }
};
