// The 6-bit scales and minimums of q4_k and q5_k: the 8 groups of a row share 12 bytes, laid out as in
// qgemm/formats/q4_k.py; in a tile 6 words of two bytes for each of rows g and g + 8.
#pragma once

#include "codes/half_scales.cuh"

namespace qgemm {

// Scales and minimums of groups 2 p and 2 p + 1: bytes 0 and 1 of row g, 2 and 3 of row g + 8.
struct SixBits {
    u32 scales, minimums;
    __device__ SixBits(const u16 (&words)[6][2], int p) {
        const u32* both = reinterpret_cast<const u32*>(words) + p % 2u;
        const u32 first = both[0], second = both[2], rest = both[4];
        // Groups 4 to 7 have four bits in the rest and two bits above those of groups 0 to 3.
        const u32 here = p < 2 ? 0x3f3f3f3f : 0x30303030, there = p < 2 ? 0 : 0x0f0f0f0f;
        const int shift = p < 2 ? 0 : 2;
        scales = (first >> shift & here) | (rest & there);
        minimums = (second >> shift & here) | (rest >> 4 & there);
    }
};

// The byte of group `index` of rows g and g + 8, times a power of two.
__device__ inline half2 six_bit_numbers(u32 bytes, int index, half2 unit) {
    return numbers_from(bytes >> 8 * (index & 1) & 0x003f003f, 0, unit);
}

template <class Fields>
struct SixBitFields : Fields {
    __device__ half2 sub_scale(int m16, int g, int index, half2 unit) const {
        return six_bit_numbers(SixBits(this->scales[m16][g][0], index >> 1).scales, index, unit);
    }
    __device__ half2 sub_minimum(int m16, int g, int index, half2 unit) const {
        return six_bit_numbers(SixBits(this->scales[m16][g][0], index >> 1).minimums, index, unit);
    }
    __device__ void sub_minimums(u32 (&pairs)[2], int m16, int g, int pair) const {
        minimum_pairs(pairs, SixBits(this->scales[m16][g][0], pair).minimums);
    }
};

// Scales and minimums from the fields d, dmin and scales.
template <class Fields>
struct SixBitScales : SuperMinimums<SixBitFields<Fields>> {};

}  // namespace qgemm
