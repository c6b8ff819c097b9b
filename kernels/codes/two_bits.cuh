// Codes of two bits, a word for two steps: byte j is column j; row g has bits 0 and 1 (the even step) and 2 and 3, row
// g + 8 the same places in the high nibble. Codes of three bits have their third in another word: in its byte j, row g
// has bits 0 to 3, a bit for each of the four steps, and row g + 8 bits 4 to 7.
#pragma once

#include "codes/masked.cuh"
#include "codes/signed_bytes.cuh"

namespace qgemm {

struct TwoBitWord {
    template <class Codes>
    static __device__ u32 word(const Codes& codes, int step) {
        return codes.low[step / 2] >> 2 * (step % 2);
    }
};

struct ThreeBitWord {
    template <class Codes>
    static __device__ u32 word(const Codes& codes, int step) {
        const u32 low = TwoBitWord::word(codes, step), high = codes.high[0];
        return (low & 0x33333333) | ((step < 2 ? high << (2 - step) : high >> (step - 2)) & 0x44444444);
    }
};

// w = scale * (q - Z) + minimum; bytes() are q.
template <class Fields, int Z>
struct TwoBits : MaskedCodes<Fields, TwoBitWord, 3, Z> {
    using Codes = typename Fields::Codes;
    static_assert(code_bits_are<Codes>(2), "TwoBits: a field of two-bit codes");
    static constexpr int ZERO = Z;

    static __device__ Bytes bytes(const Codes& codes, int step) { return TwoBits::masked_bytes(codes, step); }
    static __device__ constexpr int slice_shift(int step) { return 2 * (step % 2); }
    static __device__ void place_bytes(Bytes& first, Bytes& second, const Codes& codes, int pair) {
        const u32 both = codes.low[pair];
        first = {both & 0x03030303, both & 0x30303030}, second = {both & 0x0c0c0c0c, both & 0xc0c0c0c0};
    }
};

// w = scale * (q - Z) + minimum; bytes() are levels, q - Z: groups of 16, as those of q3_k, have no sum of x of their
// own by which a zero could be subtracted later.
template <class Fields, int Z>
struct ThreeBits : MaskedCodes<Fields, ThreeBitWord, 7, Z> {
    using Codes = typename Fields::Codes;
    static_assert(code_bits_are<Codes>(2, 1), "ThreeBits: a field of the low two bits, then one of the high bits");
    static constexpr int ZERO = 0;  // bytes() are levels

    static __device__ Bytes bytes(const Codes& codes, int step) {
        const Bytes q = ThreeBits::masked_bytes(codes, step);
        return {centred<Z>(q.row[0]), centred<Z>(q.row[1])};
    }
    static __device__ constexpr int slice_shift(int) { return 0; }
    static __device__ void place_bytes(Bytes& first, Bytes& second, const Codes& codes, int pair) {
        const u32 even = ThreeBitWord::word(codes, 2 * pair), odd = ThreeBitWord::word(codes, 2 * pair + 1);
        first = {even & 0x07070707, even & 0x70707070}, second = {odd & 0x07070707, odd & 0x70707070};
    }
};

}  // namespace qgemm
