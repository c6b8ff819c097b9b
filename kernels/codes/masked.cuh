// Codes of one to four bits, which one mask takes from a word: row g has the low nibble of each byte, row g + 8 the
// high one. Base of nibbles.cuh, two_bits.cuh and one_bit.cuh.
#pragma once

#include "fragment.cuh"

namespace qgemm {

// Word::word(codes, step) returns a lane's word of a step; only the bits under MASK are codes. They are level + BIAS as
// an integer.
template <class Fields, class Word, u32 MASK, int BIAS>
struct MaskedCodes : Fields {
    using Codes = typename Fields::Codes;
    // The masked bits q are the subnormal half q * 2^-24, which tensor cores multiply exactly: decoding is masking.
    static constexpr int CODE_BIAS = BIAS, CODE_EXPONENT = 24, HIGH_ROW_SHIFT = 4;
    static constexpr u32 ROW = MASK << 16 | MASK, ROW_8 = ROW << 4;  // two halves
    static constexpr u32 BYTES = ROW << 8 | ROW;                     // four bytes

    static __device__ Fragment codes_f16(const Codes& codes, int step) {
        const u32 near = Word::word(codes, step), far = near >> 8;
        return as_fragment(near & ROW, near & ROW_8, far & ROW, far & ROW_8);
    }
    static __device__ Fragment fragment(const Codes& codes, int step) {
        const u32 near = Word::word(codes, step), far = near >> 8;
        return {levels_from<0>(near & ROW, BIAS), levels_from<4>(near & ROW_8, BIAS), levels_from<0>(far & ROW, BIAS),
                levels_from<4>(far & ROW_8, BIAS)};
    }
    // The masked bits as bytes: level + BIAS.
    static __device__ Bytes masked_bytes(const Codes& codes, int step) {
        const u32 word = Word::word(codes, step);
        return {word & BYTES, word >> 4 & BYTES};
    }
    template <class KBlock>
    static __device__ Codes placed_codes(const KBlock& k_block, int m16, int lane) {
        return k_block.codes(m16, lane);
    }
};

}  // namespace qgemm
