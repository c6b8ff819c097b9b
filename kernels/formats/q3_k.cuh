// q3_k:  w = d * sc * (q - 4),  q in 0..7, sc in -32..31 a group of 16.       Twin of qgemm/formats/q3_k.py.
#pragma once

#include "codes/half_scales.cuh"
#include "codes/k_quant_encoder.cuh"
#include "codes/two_bits.cuh"
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
};

template <int M16_TILES>
struct q3_k : ThreeBits<SuperScales<q3_k_scales<M16_TILES>>, 4> {
    template <bool WEIGHTED>
    using GroupEncoder = SymmetricGroups<Q3KKind, WEIGHTED>;
};

}  // namespace qgemm
