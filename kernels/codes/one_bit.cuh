// Codes of one bit: those of a k_block are one word of a lane. Byte j is column j, its low nibble row g, the high row
// g + 8, a bit a step.
#pragma once

#include "fragment.cuh"

namespace qgemm {

// The bits of a step, of rows g and g + 8, as they stand in a word.
__device__ inline Bytes placed_bits(u32 word, int step) {
    return {word & 0x01010101 << step, word & 0x10101010 << step};
}

// A format of levels 2 q - 1.
template <class Fields>
struct PlusMinusOne : Fields {
    using Codes = typename Fields::Codes;
    static constexpr int ZERO = 0;  // of bytes(), which are levels
    static constexpr int CODE_BIAS = 1, CODE_EXPONENT = 24, HIGH_ROW_SHIFT = 4;

    // 2 q of row g at bit 0 of each byte, of row g + 8 at bit 4; other bits are not codes.
    static __device__ u32 word(const Codes& codes, int step) {
        return step ? codes.qs[0] >> (step - 1) : codes.qs[0] << 1;
    }
    static __device__ Fragment codes_f16(const Codes& codes, int step) {
        const u32 near = word(codes, step), far = near >> 8;
        return as_fragment(near & 0x00020002, near & 0x00200020, far & 0x00020002, far & 0x00200020);
    }
    static __device__ Fragment fragment(const Codes& codes, int step) {
        const u32 near = word(codes, step), far = near >> 8;
        return {levels_from<0>(near & 0x00020002, 1), levels_from<4>(near & 0x00200020, 1),
                levels_from<0>(far & 0x00020002, 1), levels_from<4>(far & 0x00200020, 1)};
    }
    // 255 - 254 q in each byte: -1 or 1.
    static __device__ Bytes bytes(const Codes& codes, int step) {
        const u32 row = codes.qs[0] >> step, row8 = codes.qs[0] >> (step + 4);
        return {~0u - 254 * (row & 0x01010101), ~0u - 254 * (row8 & 0x01010101)};
    }
    // level + 1 is 2 q.
    template <class KBlock>
    static __device__ Codes placed_codes(const KBlock& k_block, int m16, int lane) {
        return k_block.codes(m16, lane);
    }
    static __device__ constexpr int slice_shift(int step) { return step - 1; }
    static __device__ void place_bytes(Bytes& first, Bytes& second, const Codes& codes, int pair) {
        first = placed_bits(codes.qs[0], 2 * pair), second = placed_bits(codes.qs[0], 2 * pair + 1);
    }
};

// A format of levels q.
template <class Fields>
struct OneBit : Fields {
    using Codes = typename Fields::Codes;
    static constexpr int ZERO = 0, CODE_BIAS = 0, CODE_EXPONENT = 24, HIGH_ROW_SHIFT = 4;

    static __device__ Fragment codes_f16(const Codes& codes, int step) {
        const u32 near = codes.qs[0] >> step, far = near >> 8;
        return as_fragment(near & 0x00010001, near & 0x00100010, far & 0x00010001, far & 0x00100010);
    }
    static __device__ Fragment fragment(const Codes& codes, int step) {
        const u32 near = codes.qs[0] >> step, far = near >> 8;
        return {levels_from<0>(near & 0x00010001, 0), levels_from<4>(near & 0x00100010, 0),
                levels_from<0>(far & 0x00010001, 0), levels_from<4>(far & 0x00100010, 0)};
    }
    static __device__ Bytes bytes(const Codes& codes, int step) {
        return {codes.qs[0] >> step & 0x01010101, codes.qs[0] >> (step + 4) & 0x01010101};
    }
    template <class KBlock>
    static __device__ Codes placed_codes(const KBlock& k_block, int m16, int lane) {
        return k_block.codes(m16, lane);
    }
    static __device__ constexpr int slice_shift(int step) { return step; }
    static __device__ void place_bytes(Bytes& first, Bytes& second, const Codes& codes, int pair) {
        first = placed_bits(codes.qs[0], 2 * pair), second = placed_bits(codes.qs[0], 2 * pair + 1);
    }
};

}  // namespace qgemm
