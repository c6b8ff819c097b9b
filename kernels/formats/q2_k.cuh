// q2_k:  w = d * sc * q - dmin * m,  q in 0..3, sc and m in 0..15 a group of 16.
// Twin of qgemm/formats/q2_k.py.
#pragma once

#include "codes/half_scales.cuh"
#include "codes/k_quant_encoder.cuh"
#include "codes/two_bits.cuh"
#include "ptx/prmt.cuh"
#include "tiles/q2_k.cuh"

namespace qgemm {

template <int M16_TILES>
struct q2_k_scales : q2_k_fields<M16_TILES> {
    // Groups 2 p and 2 p + 1: two bytes of row g, then of row g + 8, sc in the low nibbles, m in the high ones.
    __device__ u32 pair_of_groups(int m16, int g, int p) const {
        return reinterpret_cast<const u32*>(this->scales[m16][g][0])[p];
    }
    __device__ half2 sub_scale(int m16, int g, int index, half2 unit) const {
        return numbers_from(pair_of_groups(m16, g, index >> 1) >> 8 * (index & 1) & 0x000f000f, 0, unit);
    }
    __device__ half2 sub_minimum(int m16, int g, int index, half2 unit) const {
        return numbers_from(pair_of_groups(m16, g, index >> 1) >> (8 * (index & 1) + 4) & 0x000f000f, 0, unit);
    }
    static constexpr int SUB_SHIFT = 0;
    __device__ u32 sub_scale_bytes(int m16, int g, int k_block, int odd) const {
        const u32 first = pair_of_groups(m16, g, 2 * k_block), second = pair_of_groups(m16, g, 2 * k_block + 1);
        return prmt(first, second, odd ? 0x7351 : 0x6240) & 0x0f0f0f0f;
    }
    __device__ void sub_minimums(u32 (&pairs)[2], int m16, int g, int pair) const {
        minimum_pairs(pairs, pair_of_groups(m16, g, pair) >> 4 & 0x0f0f0f0f);
    }
};

template <int M16_TILES>
struct q2_k : TwoBits<SuperMinimums<q2_k_scales<M16_TILES>>, 0> {
    template <bool WEIGHTED>
    using GroupEncoder = AffineGroups<Q2KKind, WEIGHTED>;
};

}  // namespace qgemm
