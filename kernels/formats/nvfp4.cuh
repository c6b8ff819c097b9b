// nvfp4:  w = d / 2 * v,  v twice the e2m1 number: 0, 1, 2, 3, 4, 6, 8, 12 and negative; d a float of eight bits, one
// a group of 16. Twin of qgemm/formats/nvfp4.py.
#pragma once

#include "codes/e2m1.cuh"
#include "tiles/nvfp4.cuh"

namespace qgemm {

// Two floats of four bits of exponent, bias 7, and three of mantissa, one in each half-word, bit 7 being ignored and 0x7f
// 0 -> half of each. Shifted by 7 bits they are halves with another bias, by which they are 2^7 too small; subnormal
// ones as well.
__device__ inline half2 half_of_ue4m3(u32 pair) {
    const u32 nan = (pair + 0x00010001) & ~pair & 0x00800080;  // 0x7f is 0
    return __hmul2(as_half2((pair & 0x007f007f & ~(nan - (nan >> 7))) << 7), __float2half2_rn(128));
}

template <int M16_TILES>
struct nvfp4 : E2m1<nvfp4_fields<M16_TILES>> {
    static constexpr bool HAS_MINIMUM = false;

    __device__ float2 scale(int m16, int g, int index) const {
        // Two bytes of row g, then of row g + 8.
        const u32 word = reinterpret_cast<const u32*>(this->d[m16][g][0])[index >> 1];
        return __half22float2(half_of_ue4m3(word >> 8 * (index & 1) & 0x00ff00ff));
    }
    __device__ float2 minimum(int, int, int) const { return {}; }
};

}  // namespace qgemm
