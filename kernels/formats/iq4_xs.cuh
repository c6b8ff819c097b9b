// iq4_xs:  w = d * sc * value(q),  q in 0..15, sc in -32..31 a group of 32.
// Twin of qgemm/formats/iq4_xs.py.
#pragma once

#include "codes/half_scales.cuh"
#include "codes/iq4_encoder.cuh"
#include "codes/iq4_values.cuh"
#include "tiles/iq4_xs.cuh"

namespace qgemm {

template <int M16_TILES>
struct iq4_xs_scales : iq4_xs_fields<M16_TILES> {
    __device__ half2 sub_scale(int m16, int g, int index, half2 unit) const {
        // The lower half of each word is row g: four low nibbles, or the high bits of all eight groups.
        const u32 low = reinterpret_cast<const u32*>(this->scales_l[m16][g][0])[index >> 2] >> 4 * (index & 3);
        const u32 high = reinterpret_cast<const u32*>(this->scales_h[m16][g])[0] >> 2 * index;
        return numbers_from((low & 0x000f000f) | (high & 0x00030003) << 4, 32, unit);
    }
};

template <int M16_TILES>
struct iq4_xs : Iq4Values<SuperScales<iq4_xs_scales<M16_TILES>>> {
    template <bool WEIGHTED>
    using GroupEncoder = Iq4Groups<WEIGHTED>;
};

}  // namespace qgemm
