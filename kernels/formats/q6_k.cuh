// q6_k:  w = d * sc * (q - 32),  q in 0..63, sc in -128..127 a group of 16.       Twin of qgemm/formats/q6_k.py.
#pragma once

#include "../fragment.cuh"

// The high two bits of a step above its nibbles: bits 2 (step % 2) + 4 r of byte j of a word for two steps are column j
// of row g + 8 r. One shift serves both rows, near (columns 2t, 2t + 1) and far (2t + 8, 2t + 9).
__device__ inline Fragment raw_six_bits(u32 word, u32 upper, int step) {
    const u32 high = word >> 8, near = upper << (4 - 2 * (step % 2)), far = upper >> (4 + 2 * (step % 2));
    return raw((word & 0x000f000f) | (near & 0x00300030), (word & 0x00f000f0) | (near & 0x03000300),
               (high & 0x000f000f) | (far & 0x00300030), (high & 0x00f000f0) | (far & 0x03000300));
}

template <int GROUPS>
struct q6_k : q6_k_fields<GROUPS> {
    using Codes = q6_k_codes;
    static constexpr int ZERO = 0;  // of bytes(), which are levels: groups of 16 have no sum of their own in q8_1
    static constexpr bool HAS_MINIMUM = false;

    static __device__ Fragment fragment(const Codes& codes, int step) {
        const u32* bits = reinterpret_cast<const u32*>(raw(codes, step).a);
        return {levels_from_1024(bits[0], RAW_ZERO), levels_from_64(bits[1], RAW_ZERO),
                levels_from_1024(bits[2], RAW_ZERO), levels_from_64(bits[3], RAW_ZERO)};
    }
    // Codes above -RAW_ZERO as halves, times 2^-RAW_EXPONENT.
    static constexpr int RAW_ZERO = 32, RAW_EXPONENT = 24, RAW_SHIFT = 4;
    static __device__ Fragment raw(const Codes& codes, int step) {
        return raw_six_bits(codes.ql[step], codes.qh[step / 2], step);
    }
    static __device__ Bytes bytes(const Codes& codes, int step) {
        const Bytes low = nibble_bytes(codes.ql[step]);
        const u32 upper = codes.qh[step / 2], shift = 2 * (step % 2);
        return {centred(low.row[0] | ((upper << (4 - shift)) & 0x30303030)),
                centred(low.row[1] | ((upper >> shift) & 0x30303030))};
    }
    // q - 32 as signed bytes: no byte borrows from the next while its top bit is set.
    static __device__ u32 centred(u32 q) { return ((q | 0x80808080) - 0x20202020) ^ 0x80808080; }
    __device__ float2 scale(int group, int g, int index) const {
        // sc + 128 of two groups of row g, then of row g + 8
        const u32 sc = reinterpret_cast<const u32*>(this->scales[group][g][0])[index >> 1] ^ 0x80808080;
        const half2 pair = levels_from_1024(sc >> 8 * (index & 1) & 0x00ff00ff, 128);
        return multiply_rounded(row_pair(this->d[group][g][0]), __half22float2(pair));
    }
    __device__ float2 minimum(int, int, int) const { return {}; }
};
