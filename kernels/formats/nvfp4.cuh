// nvfp4:  w = d / 2 * v,  v twice the e2m1 number: 0, 1, 2, 3, 4, 6, 8, 12 and negative; d a float of eight bits for
// each group of 16. Twin of qgemm/formats/nvfp4.py.
#pragma once

#include "codes/e2m1.cuh"
#include "codes/group_encoder.cuh"
#include "tiles/nvfp4.cuh"

namespace qgemm {

// Two E4M3 scales in half-words -> half of each scale. Bit 7 is ignored, and 0x7f is 0. Shifted by 7 bits, scales are
// halves with another bias, 2^8 times too small, subnormal scales included.
__device__ inline half2 half_of_ue4m3(u32 pair) {
    const u32 nan = (pair + 0x00010001) & ~pair & 0x00800080;  // 0x7f is 0
    return __hmul2(as_half2((pair & 0x007f007f & ~(nan - (nan >> 7))) << 7), __float2half2_rn(128));
}

// A scale from 0 on -> its byte: to nearest, halves up; 448 for scales that become 256 or more, as in ggml.
__device__ inline int ue4m3_of(Rounded scale) {
    constexpr int BIAS = 127 - 7, MAX_SCALE = 0x7e;
    if (!(scale > 0)) return 0;
    const int bits = min(__float_as_int(scale.value), __float_as_int(448.0f)), exponent = (bits >> 23) - BIAS;
    if (exponent <= 0) return min(__float2int_rz((scale * 512 + 0.5f).value), 7);
    const int rounded = ((bits >> 19) + 1 >> 1) - (BIAS << 3);
    return rounded >= 15 << 3 ? MAX_SCALE : rounded;
}

struct nvfp4_groups {
    static constexpr int GROUPS = 4, SIZE = 16;
    Rounded largest, unit;
    int d;

    __device__ nvfp4_groups(const float (&x)[SIZE], const float (&)[SIZE]) : largest(0) {
#pragma unroll
        for (float value : x) largest = fmaxf(largest.value, fabsf(value));
        d = ue4m3_of(largest / 6);
        unit = __low2float(half_of_ue4m3(d));
    }
    __device__ bool holds() const { return is_finite(largest); }
    // The code of the nearest number, ties to the lower one; errors are rounded before they are compared, as in C.
    __device__ u32 code(int, float x) const {
        constexpr int MAGNITUDES[] = {0, 1, 2, 3, 4, 6, 8, 12};
        const Rounded size = fabsf(x);
        Rounded least = size;
        u32 code = 0;
#pragma unroll
        for (int i = 1; i < 8; ++i) {
            const Rounded error = magnitude(unit * float(MAGNITUDES[i]) - size);
            if (error < least) least = error, code = i;
        }
        return x < 0 && code ? code + 8 : code;
    }
    __device__ float decode(u32 code) const {
        const float size = (unit * float(__byte_perm(0x03020100, 0x0c080604, code & 7) & 0xff)).value;
        return code & 8 ? -size : size;
    }
    __device__ void write(nvfp4_block& block, const u8* codes) const {
        write_planes<4, 0, 8, 32, GROUPS>(block.qs, codes);
        block.d[GroupLanes<GROUPS>::group()] = d;
    }
};

template <int M16_TILES>
struct nvfp4 : E2m1<nvfp4_fields<M16_TILES>> {
    static constexpr bool HAS_MINIMUM = false;
    template <bool WEIGHTED>
    using GroupEncoder = nvfp4_groups;

    __device__ float2 scale(int m16, int g, int index) const {
        // Two bytes of row g, then of row g + 8.
        const u32 word = reinterpret_cast<const u32*>(this->d[m16][g][0])[index >> 1];
        return __half22float2(half_of_ue4m3(word >> 8 * (index & 1) & 0x00ff00ff));
    }
    __device__ float2 minimum(int, int, int) const { return {}; }
};

}  // namespace qgemm
