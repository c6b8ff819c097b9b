// Codes of four bits, eight in a word of a step: byte j is column j of row g (low nibble) and of row g + 8 (high).
#pragma once

#include "fragment.cuh"

namespace qgemm {

template <class Fields, int OF_ZERO>
struct Nibbles : Fields {
    using Codes = typename Fields::Codes;
    static constexpr int ZERO = OF_ZERO;

    static __device__ Fragment fragment(const Codes& codes, int step) {
        const u32 word = codes.qs[step], high = word >> 8;
        return {levels_from<0>(word & 0x000f000f, ZERO), levels_from<4>(word & 0x00f000f0, ZERO),
                levels_from<0>(high & 0x000f000f, ZERO), levels_from<4>(high & 0x00f000f0, ZERO)};
    }
    // The bits of code q are the subnormal half q * 2^-24, which tensor cores multiply exactly: decoding is masking.
    static constexpr int CODE_BIAS = ZERO, CODE_EXPONENT = 24, HIGH_ROW_SHIFT = 4;
    static __device__ Fragment codes_f16(const Codes& codes, int step) {
        const u32 word = codes.qs[step], high = word >> 8;
        return as_fragment(word & 0x000f000f, word & 0x00f000f0, high & 0x000f000f, high & 0x00f000f0);
    }
    static __device__ Bytes bytes(const Codes& codes, int step) {
        const u32 word = codes.qs[step];
        return {word & 0x0f0f0f0f, (word >> 4) & 0x0f0f0f0f};
    }
};

}  // namespace qgemm
