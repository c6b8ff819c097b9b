// Codes of one bit: those of a k_block are one word of a lane. Byte j is column j, its low nibble row g, the high row
// g + 8, a bit for each step.
#pragma once

#include "codes/masked.cuh"

namespace qgemm {

// Twice the code: row g from bit 0 of each byte on, row g + 8 from bit 4 on.
struct DoubledBitWord {
    template <class Codes>
    static __device__ u32 word(const Codes& codes, int step) {
        return step ? codes.low[0] >> (step - 1) : codes.low[0] << 1;
    }
};

struct BitWord {
    template <class Codes>
    static __device__ u32 word(const Codes& codes, int step) {
        return codes.low[0] >> step;
    }
};

// The bits of a step of rows g and g + 8, at their places in the word.
__device__ inline Bytes placed_bits(u32 word, int step) {
    return {word & 0x01010101 << step, word & 0x10101010 << step};
}

// w = scale * (2 q - 1); bytes() are levels.
template <class Fields>
struct PlusMinusOne : MaskedCodes<Fields, DoubledBitWord, 2, 1> {
    using Codes = typename Fields::Codes;
    static_assert(code_bits_are<Codes>(1), "PlusMinusOne: a field of one-bit codes");
    static constexpr int ZERO = 0;  // bytes() are levels

    // 255 - 254 q in each byte: -1 or 1.
    static __device__ Bytes bytes(const Codes& codes, int step) {
        const u32 row = codes.low[0] >> step, row8 = codes.low[0] >> (step + 4);
        return {~0u - 254 * (row & 0x01010101), ~0u - 254 * (row8 & 0x01010101)};
    }
    // level + 1 is 2 q.
    static __device__ constexpr int slice_shift(int step) { return step - 1; }
    static __device__ void place_bytes(Bytes& first, Bytes& second, const Codes& codes, int pair) {
        first = placed_bits(codes.low[0], 2 * pair), second = placed_bits(codes.low[0], 2 * pair + 1);
    }
};

// w = scale * q + minimum; bytes() are q.
template <class Fields>
struct OneBit : MaskedCodes<Fields, BitWord, 1, 0> {
    using Codes = typename Fields::Codes;
    static_assert(code_bits_are<Codes>(1), "OneBit: a field of one-bit codes");
    static constexpr int ZERO = 0;

    static __device__ Bytes bytes(const Codes& codes, int step) { return OneBit::masked_bytes(codes, step); }
    static __device__ constexpr int slice_shift(int step) { return step; }
    static __device__ void place_bytes(Bytes& first, Bytes& second, const Codes& codes, int pair) {
        first = placed_bits(codes.low[0], 2 * pair), second = placed_bits(codes.low[0], 2 * pair + 1);
    }
};

}  // namespace qgemm
