// q8_0:  w = d * q,  q in -128..127.       Twin of qgemm/formats/q8_0.py.
#pragma once

#include "../encoder.cuh"
#include "../fragment.cuh"

template <int GROUPS>
struct q8_0 : HalfScales<q8_0_fields<GROUPS>> {
    using Codes = q8_0_codes;
    static constexpr int ZERO = 0;
    static constexpr bool HAS_MINIMUM = false;
    using Encoder = SignedEncoder<q8_0_block>;

    static __device__ Fragment fragment(const Codes& codes, int step) {
        return byte_fragment(codes.qs[2 * step], codes.qs[2 * step + 1]);
    }
    // Codes above -RAW_ZERO as halves, times 2^-RAW_EXPONENT.
    static constexpr int RAW_ZERO = 128, RAW_EXPONENT = 24, RAW_SHIFT = 0;
    static __device__ Fragment raw(const Codes& codes, int step) {
        return raw_bytes(codes.qs[2 * step], codes.qs[2 * step + 1]);
    }
    static __device__ Bytes bytes(const Codes& codes, int step) { return {codes.qs[2 * step], codes.qs[2 * step + 1]}; }
};
