// Signed codes of eight bits: a tile holds q + 128, whose bits are a subnormal half.
// Twin of qgemm/codec/layouts/signed_bytes.py.
#pragma once

#include "fragment.cuh"

namespace qgemm {

// Four signed bytes q <-> q + 128.
__device__ inline u32 signed_bytes(u32 word) { return word ^ 0x80808080; }

// Four bytes q below 128 -> q - ZERO as signed bytes; the top bits keep bytes from borrowing.
template <int ZERO>
__device__ inline u32 centred(u32 q) {
    return signed_bytes((q | 0x80808080) - 0x01010101 * ZERO);
}

// Four signed bytes of one row, columns 2t, 2t + 8, 2t + 1, 2t + 9 -> halves of columns (2t, 2t + 1), (2t + 8, 2t + 9).
__device__ inline void signed_byte_levels(u32 word, half2& near, half2& far) {
    const u32 biased = signed_bytes(word);
    near = levels_from<0>(__byte_perm(biased, 0, 0x4240), 128);
    far = levels_from<0>(__byte_perm(biased, 0, 0x4341), 128);
}

// w = scale * q; bytes() are levels.
template <class Fields>
struct SignedBytes : Fields {
    using Codes = typename Fields::Codes;
    static_assert(code_bits_are<Codes>(8), "SignedBytes: a field of eight-bit codes");
    static constexpr int ZERO = 0;  // bytes() are levels

    static __device__ void to_tile(Codes& codes) {
#pragma unroll
        for (u32& word : codes.low) word = signed_bytes(word);
    }
    static __device__ void from_tile(Codes& codes) { to_tile(codes); }
    static __device__ Fragment fragment(const Codes& codes, int step) {
        Fragment f = codes_f16(codes, step);
#pragma unroll
        for (half2& pair : f.a) pair = levels_from<0>(*reinterpret_cast<const u32*>(&pair), CODE_BIAS);
        return f;
    }
    // (level + CODE_BIAS) * 2^-CODE_EXPONENT as halves.
    static constexpr int CODE_BIAS = 128, CODE_EXPONENT = 24, HIGH_ROW_SHIFT = 0;
    static __device__ Fragment codes_f16(const Codes& codes, int step) {
        const u32 row = codes.low[2 * step], row8 = codes.low[2 * step + 1];
        return as_fragment(__byte_perm(row, 0, 0x4240), __byte_perm(row8, 0, 0x4240), __byte_perm(row, 0, 0x4341),
                           __byte_perm(row8, 0, 0x4341));
    }
    static __device__ Bytes bytes(const Codes& codes, int step) {
        return {signed_bytes(codes.low[2 * step]), signed_bytes(codes.low[2 * step + 1])};
    }
};

}  // namespace qgemm
