// q5_0:  w = d * (q - 16),  q in 0..31.       Twin of qgemm/formats/q5_0.py.
#pragma once

#include "../encoder.cuh"
#include "../fragment.cuh"

template <int GROUPS>
struct q5_0 : q5_0_fields<GROUPS> {
    using Codes = q5_0_codes;
    static constexpr int ZERO = 16;
    static constexpr bool HAS_MINIMUM = false;
    using Encoder = SymmetricEncoder<q5_0_block, ZERO>;

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
    __device__ float2 scale(int group, int g, int block) const { return row_pair(this->d[group][g][block]); }
    __device__ float2 minimum(int, int, int) const { return {}; }
};
