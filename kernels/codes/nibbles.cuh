// Codes of four bits, eight in a word of a step: byte j is column j of row g (low nibble) and of row g + 8 (high).
#pragma once

#include "codes/masked.cuh"

namespace qgemm {

struct NibbleWord {
    template <class Codes>
    static __device__ u32 word(const Codes& codes, int step) {
        return codes.low[step];
    }
};

// w = scale * (q - Z) + minimum; bytes() are q.
template <class Fields, int Z>
struct Nibbles : MaskedCodes<Fields, NibbleWord, 0xf, Z> {
    using Codes = typename Fields::Codes;
    static_assert(code_bits_are<Codes>(4), "Nibbles: a field of four-bit codes");
    static constexpr int ZERO = Z;

    static __device__ Bytes bytes(const Codes& codes, int step) { return Nibbles::masked_bytes(codes, step); }
};

}  // namespace qgemm
