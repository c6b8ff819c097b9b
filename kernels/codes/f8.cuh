// Codes that are floats of eight bits, e4m3 or e5m2, with a float32 scale: a family whose formats/NAME.cuh are
// generated. Twin of qgemm/formats/f8.py, except that e4m3's codes of NaN are 480 and -480 here.
#pragma once

#include "fragment.cuh"

namespace qgemm {

// e5m2 is the upper byte of a half. Exponent and mantissa of e4m3, moved one bit down, make a half. It is the number
// times 2^-8, because its exponent has another bias; subnormal numbers included.
template <class Fields>
struct Floats8 : Fields {
    using Codes = typename Fields::Codes;
    static_assert(code_bits_are<Codes>(8), "Floats8: a field of eight-bit codes");
    static constexpr bool HAS_MINIMUM = false;
    static constexpr int ZERO = 0, CODE_BIAS = 0, CODE_EXPONENT = Fields::LEVEL_EXPONENT, HIGH_ROW_SHIFT = 0;
    static constexpr bool E4M3 = CODE_EXPONENT == 8;

    // Bytes 1 and 3 of a word, columns 2t + 8 and 2t + 9, as halves. Shifting the word gives columns 2t and 2t + 1.
    static __device__ u32 halves(u32 word) {
        if constexpr (E4M3) return (word >> 1 & 0x3f803f80) | (word & 0x80008000);
        return word & 0xff00ff00;
    }
    static __device__ Fragment codes_f16(const Codes& codes, int step) {
        const u32 row = codes.low[2 * step], row8 = codes.low[2 * step + 1];
        return as_fragment(halves(row << 8), halves(row8 << 8), halves(row), halves(row8));
    }
    static __device__ Fragment fragment(const Codes& codes, int step) {
        Fragment f = codes_f16(codes, step);
        if constexpr (E4M3)
#pragma unroll
            for (half2& pair : f.a) pair = __hmul2(pair, __float2half2_rn(two_to(CODE_EXPONENT)));
        return f;
    }
    static __device__ Bytes bytes(const Codes&, int) { return {}; }  // levels are no integers: there is no a8

    __device__ float2 scale(int m16, int g, int index) const {
        return *reinterpret_cast<const float2*>(this->d[m16][g][index]);
    }
    __device__ float2 minimum(int, int, int) const { return {}; }
};

}  // namespace qgemm
