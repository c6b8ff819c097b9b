// q3_k:  w = d * sc * (q - 4),  q in 0..7, sc in -32..31 a group of 16.       Twin of qgemm/formats/q3_k.py.
#pragma once

#include "codes/half_scales.cuh"
#include "codes/k_quant_encoder.cuh"
#include "codes/two_bits.cuh"
#include "ptx/prmt.cuh"
#include "tiles/q3_k.cuh"

namespace qgemm {

template <int M16_TILES>
struct q3_k_scales : q3_k_fields<M16_TILES> {
    __device__ half2 sub_scale(int m16, int g, int index, half2 unit) const {
        // Two bytes of row g, then of row g + 8: byte index % 8 has four bits, byte 8 + index % 4 two more.
        const u32* words = reinterpret_cast<const u32*>(this->scales[m16][g][0]);
        const u32 low = words[(index & 7) >> 1] >> (8 * (index & 1) + 4 * (index >> 3));
        const u32 high = words[4 + ((index & 3) >> 1)] >> (8 * (index & 1) + 2 * (index >> 2));
        return numbers_from((low & 0x000f000f) | (high & 0x00030003) << 4, 32, unit);
    }
    static constexpr int SUB_SHIFT = 2;  // six bits with a sign at the top of a byte
    __device__ u32 sub_scale_bytes(int m16, int g, int k_block, int odd) const {
        const u32* words = reinterpret_cast<const u32*>(this->scales[m16][g][0]);
        const u32* pairs = words + 2 * (k_block & 1);
        const u32 of_step = odd ? 0x7351 : 0x6240;
        const u32 low = prmt(pairs[0], pairs[1], of_step) >> 4 * (k_block >> 1);
        const u32 high = prmt(words[4], words[5], of_step) >> 2 * k_block;
        return ((low & 0x0f0f0f0f) << 2 | (high & 0x03030303) << 6) ^ 0x80808080;
    }
};

template <int M16_TILES>
struct q3_k : ThreeBits<SuperScales<q3_k_scales<M16_TILES>>, 4> {
    template <bool WEIGHTED>
    using GroupEncoder = SymmetricGroups<Q3KKind, WEIGHTED>;
};

}  // namespace qgemm
