// Scales of grids: d * (2 sc + 1) * 2^EXPONENT, sc in the field sc.
#pragma once

#include "codes/half_scales.cuh"
#include "host.cuh"

namespace qgemm {

// The bits `mask` of two nibbles of a k_block as bytes, both for the nibbles from bit 0 on and from bit 16 on. With
// groups of 16 the two nibbles are those of the even or the odd steps.
template <class Fields>
__device__ inline u32 nibble_bytes(u32 nibbles, int odd, u32 mask) {
    if constexpr (Fields::GROUP_SIZE == 16) return nibbles >> 4 * odd & (mask | mask << 8);
    return (nibbles & mask) | (nibbles & mask << 4) << 4;
}

// Scales of four bits: word i has the sc of groups 4 i to 4 i + 3.
template <class Fields, int EXPONENT>
struct NibbleScales : Fields {
    __device__ half2 sub_scale(int m16, int g, int index, half2 unit) const {
        const u32 sc = nibbles(m16, g, index) & 0x000f000f;
        return numbers_from(sc << 1 | 0x00010001, 0, __hmul2(unit, __float2half2_rn(two_to(EXPONENT))));
    }
    static constexpr int SUB_SHIFT = -EXPONENT;
    __device__ u32 sub_scale_bytes(int m16, int g, int k_block, int odd) const {
        return 2 * nibble_bytes<Fields>(nibbles(m16, g, k_block * (K_BLOCK / Fields::GROUP_SIZE)), odd, 0x000f000f) +
               0x01010101;
    }
    // The nibbles of a word from a group's nibble on: row g from bit 0, row g + 8 from bit 16.
    __device__ u32 nibbles(int m16, int g, int index) const {
        return reinterpret_cast<const u32*>(this->sc[m16][g][0])[index >> 2] >> 4 * (index & 3);
    }
};

// Scales of three bits: a bit plane of all 16 groups for each bit.
template <class Fields, int EXPONENT>
struct PlaneScales : Fields {
    __device__ half2 sub_scale(int m16, int g, int index, half2 unit) const {
        const u32* planes = reinterpret_cast<const u32*>(this->sc[m16][g][0]);
        u32 number = 0x00010001;
#pragma unroll
        for (int i = 0; i < 3; ++i) number |= (planes[i] >> index & 0x00010001) << (i + 1);
        return numbers_from(number, 0, __hmul2(unit, __float2half2_rn(two_to(EXPONENT))));
    }
    static constexpr int SUB_SHIFT = -EXPONENT;
    __device__ u32 sub_scale_bytes(int m16, int g, int k_block, int odd) const {
        const u32* planes = reinterpret_cast<const u32*>(this->sc[m16][g][0]);
        u32 bytes = 0x01010101;
#pragma unroll
        for (int i = 0; i < 3; ++i) {  // groups 0 and 2 of four, or 1 and 3
            const u32 two = planes[i] >> (4 * k_block + odd) & 0x00050005;
            bytes += (two * 0x41 & 0x01010101) << (i + 1);
        }
        return bytes;
    }
};

// Scales of three bits; the fourth bit is the sign of the minimum, which is plus or minus the scale.
template <class Fields, int EXPONENT>
struct DeltaScales : SuperScales<NibbleScales<Fields, EXPONENT>> {
    static constexpr bool HAS_MINIMUM = true;
    static constexpr float DELTA = 1;  // the minimum adds plus or minus this to a level

    __device__ half2 sub_scale(int m16, int g, int index, half2 unit) const {
        const u32 sc = this->nibbles(m16, g, index) & 0x00070007;
        return numbers_from(sc << 1 | 0x00010001, 0, __hmul2(unit, __float2half2_rn(two_to(EXPONENT))));
    }
    __device__ u32 sub_scale_bytes(int m16, int g, int k_block, int odd) const {
        const u32 nibbles = this->nibbles(m16, g, k_block * (K_BLOCK / Fields::GROUP_SIZE));
        return 2 * nibble_bytes<Fields>(nibbles, odd, 0x00070007) + 0x01010101;
    }
    __device__ half2 sub_minimum(int m16, int g, int index, half2 unit) const {
        half2 scale = sub_scale(m16, g, index, unit);
        return as_half2(*reinterpret_cast<u32*>(&scale) ^ (this->nibbles(m16, g, index) & 0x00080008) << 12);
    }
    __device__ half2 half_minimum(int m16, int g, int) const { return this->half_scale(m16, g, 0); }
    __device__ float2 scale(int m16, int g, int index) const {
        return multiply_rounded(super_minimum(m16, g), __half22float2(sub_scale(m16, g, index, __float2half2_rn(1))));
    }
    __device__ float2 minimum(int m16, int g, int index) const {
        return multiply_rounded(super_minimum(m16, g), __half22float2(sub_minimum(m16, g, index, __float2half2_rn(1))));
    }
    __device__ float2 super_minimum(int m16, int g) const { return __half22float2(this->half_scale(m16, g, 0)); }
    // The minimums of groups 2 p and 2 p + 1 as pairs of bf16, of row g and of row g + 8.
    __device__ void sub_minimums(u32 (&pairs)[2], int m16, int g, int p) const {
        const u32 both = this->nibbles(m16, g, 2 * p);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const u32 here = both >> 16 * row & 0xff, two = (here & 15) | here >> 4 << 16;
            constexpr u32 DOWN = u32(-EXPONENT) << 7;  // subtracted from the exponent of bf16
            pairs[row] = bf16_numbers((two & 0x00070007) << 1 | 0x00010001, 0) - (DOWN << 16 | DOWN);
            pairs[row] |= (two & 0x00080008) << 12;
        }
    }
};

}  // namespace qgemm
