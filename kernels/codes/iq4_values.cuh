// Codes of four bits that stand for the values of iq4_nl, looked up by prmt, four codes of a row at a time.
// Twin of to_tile and from_tile in qgemm/formats/iq4_nl.py.
#pragma once

#include "fragment.cuh"
#include "codes/signed_bytes.cuh"
#include "ptx/prmt.cuh"

namespace qgemm {

// The value of q, plus 128, is byte q of these: codes 0 to 7, then 8 to 15.
constexpr u32 IQ4_NL_LOW[] = {0x3f2d1801, 0x766a5d4f}, IQ4_NL_HIGH[] = {0xa6998d81, 0xf1d9c5b5};

// Eight codes, of row g in the lower half of a word and of row g + 8 in the upper -> their values plus 128, as bytes. Three
// bits of a code are a selector of prmt; the fourth says which of the two tables it is for.
__device__ inline Bytes iq4_nl_values(u32 codes) {
    const u32 within = codes & 0x77777777, table = (codes >> 1 & 0x44444444) | 0x32103210;
    Bytes values;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const u32 low = prmt(IQ4_NL_LOW[0], IQ4_NL_LOW[1], within >> 16 * row);
        const u32 high = prmt(IQ4_NL_HIGH[0], IQ4_NL_HIGH[1], within >> 16 * row);
        values.row[row] = prmt(low, high, table >> 16 * row);
    }
    return values;
}

// Codes in the field qs.
template <class Fields>
struct Iq4Values : Fields {
    using Codes = typename Fields::Codes;
    static constexpr int ZERO = 0;  // of bytes(), which are values

    // Row g's codes in the lower half of a word, row g + 8's in the upper.
    static __device__ void to_tile(Codes& codes) {
#pragma unroll
        for (u32& word : codes.qs) {
            u32 tiled = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                tiled |= (word >> 8 * j & 15) << 4 * j | (word >> (8 * j + 4) & 15) << (16 + 4 * j);
            word = tiled;
        }
    }
    static __device__ void from_tile(Codes& codes) {
#pragma unroll
        for (u32& word : codes.qs) {
            u32 nibbles = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                nibbles |= (word >> 4 * j & 15) << 8 * j | (word >> (16 + 4 * j) & 15) << (8 * j + 4);
            word = nibbles;
        }
    }
    static __device__ Fragment fragment(const Codes& codes, int step) {
        Fragment f = codes_f16(codes, step);
#pragma unroll
        for (half2& pair : f.a) pair = levels_from<0>(*reinterpret_cast<const u32*>(&pair), CODE_BIAS);
        return f;
    }
    // (level + CODE_BIAS) * 2^-CODE_EXPONENT as halves.
    static constexpr int CODE_BIAS = 128, CODE_EXPONENT = 24, HIGH_ROW_SHIFT = 0;
    static __device__ Fragment codes_f16(const Codes& codes, int step) {
        const Bytes values = iq4_nl_values(codes.qs[step]);
        const u32 row = values.row[0], row8 = values.row[1];
        return as_fragment(__byte_perm(row, 0, 0x4240), __byte_perm(row8, 0, 0x4240), __byte_perm(row, 0, 0x4341),
                           __byte_perm(row8, 0, 0x4341));
    }
    static __device__ Bytes bytes(const Codes& codes, int step) {
        const Bytes values = iq4_nl_values(codes.qs[step]);
        return {signed_bytes(values.row[0]), signed_bytes(values.row[1])};
    }
};

}  // namespace qgemm
