// u8_g256:  w = d * (q - 128),  q in 0..255, d a group of 256.       Twin of tests/formats_of_tests.py.
#pragma once

#include "fragment.cuh"

template <int M16_TILES>
struct u8_g256 : HalfScales<u8_g256_fields<M16_TILES>> {
    using Codes = u8_g256_codes;
    static constexpr int ZERO = 0;  // of bytes(), which are levels
    static constexpr bool HAS_MINIMUM = false;

    static __device__ Fragment fragment(const Codes& codes, int step) {
        Fragment f = codes_f16(codes, step);
#pragma unroll
        for (half2& pair : f.a) pair = levels_from<0>(*reinterpret_cast<const u32*>(&pair), CODE_BIAS);
        return f;
    }
    // Codes above -CODE_BIAS as halves, times 2^-CODE_EXPONENT.
    static constexpr int CODE_BIAS = 128, CODE_EXPONENT = 24, HIGH_ROW_SHIFT = 0;
    static __device__ Fragment codes_f16(const Codes& codes, int step) {
        const u32 row = codes.qs[2 * step], row8 = codes.qs[2 * step + 1];
        return ::codes_f16(__byte_perm(row, 0, 0x4240), __byte_perm(row8, 0, 0x4240), __byte_perm(row, 0, 0x4341),
                           __byte_perm(row8, 0, 0x4341));
    }
    static __device__ Bytes bytes(const Codes& codes, int step) {
        return {signed_bytes(codes.qs[2 * step]), signed_bytes(codes.qs[2 * step + 1])};
    }
};
