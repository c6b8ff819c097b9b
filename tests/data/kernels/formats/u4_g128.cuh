// u4_g128:  w = d * (q - z),  q in 0..15, z an integer a group of 128.       Twin of tests/formats_of_tests.py.
#pragma once

#include "fragment.cuh"

template <int M16_TILES>
struct u4_g128 : HalfScales<u4_g128_fields<M16_TILES>> {
    using Codes = u4_g128_codes;
    static constexpr int ZERO = 0;  // of all groups: each has its own in its minimum
    static constexpr bool HAS_MINIMUM = true;

    static __device__ Fragment fragment(const Codes& codes, int step) { return nibble_fragment(codes.qs[step], ZERO); }
    // Codes above -CODE_BIAS as halves, times 2^-CODE_EXPONENT.
    static constexpr int CODE_BIAS = ZERO, CODE_EXPONENT = 24, HIGH_ROW_SHIFT = 4;
    static __device__ Fragment codes_f16(const Codes& codes, int step) { return nibbles_f16(codes.qs[step]); }
    static __device__ Bytes bytes(const Codes& codes, int step) { return nibble_bytes(codes.qs[step]); }
    // -d * z
    __device__ float2 minimum(int m16, int g, int block) const {
        const u8(&z)[2] = this->z[m16][g][block];
        const float2 d = this->scale(m16, g, block);
        return multiply_rounded({-d.x, -d.y}, {float(z[0]), float(z[1])});
    }
};
