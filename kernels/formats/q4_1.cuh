// q4_1:  w = d * q + m,  q in 0..15.       Twin of qgemm/formats/q4_1.py.
#pragma once

#include "../encoder.cuh"
#include "../fragment.cuh"

template <int M16_TILES>
struct q4_1 : HalfMinimums<q4_1_fields<M16_TILES>> {
    using Codes = q4_1_codes;
    static constexpr int ZERO = 0;
    static constexpr bool HAS_MINIMUM = true;
    using Encoder = AffineEncoder<q4_1_block, 15>;

    static __device__ Fragment fragment(const Codes& codes, int step) { return nibble_fragment(codes.qs[step], ZERO); }
    // Codes above -CODE_BIAS as halves, times 2^-CODE_EXPONENT.
    static constexpr int CODE_BIAS = ZERO, CODE_EXPONENT = 24, HIGH_ROW_SHIFT = 4;
    static __device__ Fragment codes_f16(const Codes& codes, int step) { return nibbles_f16(codes.qs[step]); }
    static __device__ Bytes bytes(const Codes& codes, int step) { return nibble_bytes(codes.qs[step]); }
};
