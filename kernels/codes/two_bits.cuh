// Codes of two bits, those of two steps in a word: in byte j, column j of row g has bits 0 and 1 (the even step) and
// 2 and 3, of row g + 8 the same four bits above. With a third bit in another word, byte j of which has those of row g
// for all four steps in bits 0 to 3, of row g + 8 in bits 4 to 7.
#pragma once

#include "signed_bytes.cuh"
#include "fragment.cuh"

namespace qgemm {

// A format whose codes are in the field qs.
template <class Fields, int OF_ZERO>
struct TwoBits : Fields {
    using Codes = typename Fields::Codes;
    static constexpr int ZERO = OF_ZERO;
    static constexpr int CODE_BIAS = ZERO, CODE_EXPONENT = 24, HIGH_ROW_SHIFT = 4;

    // Row g's code at bit 0 of each byte, row g + 8's at bit 4; other bits are not codes.
    static __device__ u32 word(const Codes& codes, int step) { return codes.qs[step / 2] >> 2 * (step % 2); }
    static __device__ Fragment codes_f16(const Codes& codes, int step) {
        const u32 near = word(codes, step), far = near >> 8;
        return as_fragment(near & 0x00030003, near & 0x00300030, far & 0x00030003, far & 0x00300030);
    }
    static __device__ Fragment fragment(const Codes& codes, int step) {
        const u32 near = word(codes, step), far = near >> 8;
        return {levels_from<0>(near & 0x00030003, ZERO), levels_from<4>(near & 0x00300030, ZERO),
                levels_from<0>(far & 0x00030003, ZERO), levels_from<4>(far & 0x00300030, ZERO)};
    }
    static __device__ Bytes bytes(const Codes& codes, int step) {
        const u32 both = word(codes, step);
        return {both & 0x03030303, both >> 4 & 0x03030303};
    }
    template <class KBlock>
    static __device__ Codes placed_codes(const KBlock& k_block, int m16, int lane) {
        return k_block.codes(m16, lane);
    }
    static __device__ constexpr int slice_shift(int step) { return 2 * (step % 2); }
    static __device__ void place_bytes(Bytes& first, Bytes& second, const Codes& codes, int pair) {
        const u32 both = codes.qs[pair];
        first = {both & 0x03030303, both & 0x30303030}, second = {both & 0x0c0c0c0c, both & 0xc0c0c0c0};
    }
};

// A format with two bits of a code in the field qs, the third in hmask. bytes() have the zero subtracted, since groups
// of 16 have no sum of x of their own.
template <class Fields, int OF_ZERO>
struct ThreeBits : Fields {
    using Codes = typename Fields::Codes;
    static constexpr int ZERO = 0;  // of bytes(), which are levels
    static constexpr int CODE_BIAS = OF_ZERO, CODE_EXPONENT = 24, HIGH_ROW_SHIFT = 4;

    // Row g's code at bit 0 of each byte, row g + 8's at bit 4.
    static __device__ u32 word(const Codes& codes, int step) {
        const u32 low = codes.qs[step / 2] >> 2 * (step % 2), high = codes.hmask[0];
        return (low & 0x33333333) | ((step < 2 ? high << (2 - step) : high >> (step - 2)) & 0x44444444);
    }
    static __device__ Fragment codes_f16(const Codes& codes, int step) {
        const u32 near = word(codes, step), far = near >> 8;
        return as_fragment(near & 0x00070007, near & 0x00700070, far & 0x00070007, far & 0x00700070);
    }
    static __device__ Fragment fragment(const Codes& codes, int step) {
        const u32 near = word(codes, step), far = near >> 8;
        return {levels_from<0>(near & 0x00070007, CODE_BIAS), levels_from<4>(near & 0x00700070, CODE_BIAS),
                levels_from<0>(far & 0x00070007, CODE_BIAS), levels_from<4>(far & 0x00700070, CODE_BIAS)};
    }
    static __device__ Bytes bytes(const Codes& codes, int step) {
        const u32 both = word(codes, step);
        return {centred<OF_ZERO>(both & 0x07070707), centred<OF_ZERO>(both >> 4 & 0x07070707)};
    }
    template <class KBlock>
    static __device__ Codes placed_codes(const KBlock& k_block, int m16, int lane) {
        return k_block.codes(m16, lane);
    }
    static __device__ constexpr int slice_shift(int) { return 0; }
    static __device__ void place_bytes(Bytes& first, Bytes& second, const Codes& codes, int pair) {
        const u32 even = word(codes, 2 * pair), odd = word(codes, 2 * pair + 1);
        first = {even & 0x07070707, even & 0x70707070}, second = {odd & 0x07070707, odd & 0x70707070};
    }
};

}  // namespace qgemm
