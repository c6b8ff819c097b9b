// Weights as e4m3 numbers q, the nearest to w / s. A row has one s for the EIGHT_BIT_COLUMNS of a stage: the largest
// scale there, a power of two, times 2^-TOP. Twin of e4m3_weights in qgemm/codec/eight_bits.py.
//
// It serves formats whose scales are powers of two and whose codes are halves, level * 2^-CODE_EXPONENT. The product
// with the ratio of a scale to the largest scale loses no bit that e4m3 has.
// Config, Pipeline: as in eight_bit_scales.cuh.
#pragma once

#include "eight_bit_scales.cuh"
#include "ptx/cvt_e4m3.cuh"

namespace qgemm {

template <class Config>
struct EightBitScales<Config, true> : StageScales<Config, EightBitScales<Config, true>> {
    using Base = StageScales<Config, EightBitScales>;
    using Format = typename Config::TileFormat;
    using Base::begin, Base::LANE_GROUPS;
    using typename Base::Groups;
    static_assert(Format::CODES_ARE_LEVELS && Format::CODE_BIAS == 0 && Format::HIGH_ROW_SHIFT == 0,
                  "codes are halves without bias or shift");
    static_assert(!Format::HAS_MINIMUM && Base::W_GROUPS % 4 == 0,
                  "weights are levels times a scale; the lanes of a quad share the scales evenly");

    // The largest exponent by which no level exceeds e4m3's largest number, 448.
    static constexpr int top() {
        constexpr int LEVEL =
            Config::GREATEST_LEVEL > -Config::LEAST_LEVEL ? Config::GREATEST_LEVEL : -Config::LEAST_LEVEL;
        int exponent = 0;
        while ((LEVEL << (exponent + 1)) <= 448) ++exponent;
        return exponent;
    }
    static constexpr int TOP = top();

    float2 unit = {};          // s of rows g and g + 8
    half2 ratio[LANE_GROUPS];  // at most 2^CODE_EXPONENT

    // Groups from k_blocks on are beyond K and do not count.
    __device__ __forceinline__ void begin(const Groups& groups, int k_blocks, int lane) {
        const auto& d = groups.d;
        float2 largest = {};
#pragma unroll
        for (int i = 0; i < LANE_GROUPS; ++i)
            if (Base::inside(lane, i, k_blocks)) largest = {fmaxf(largest.x, d[i].x), fmaxf(largest.y, d[i].y)};
        largest = {max_of_quad(largest.x), max_of_quad(largest.y)};
        unit = {largest.x * two_to(-TOP), largest.y * two_to(-TOP)};
#pragma unroll
        for (int i = 0; i < LANE_GROUPS; ++i)
            ratio[i] = __floats2half2_rn(d[i].x / largest.x * two_to(Format::CODE_EXPONENT),
                                         d[i].y / largest.y * two_to(Format::CODE_EXPONENT));
    }

    // Bytes of a step, of rows g and g + 8, columns 2t, 2t + 1, 2t + 8, 2t + 9. k_block: number in the stage.
    __device__ __forceinline__ void bytes(u32 (&rows)[2], const Fragment& codes, int k_block, int step) const {
        const int group = Base::group_of_step(k_block, step);
        const half2 r = shfl_quad(ratio[group % LANE_GROUPS], group / LANE_GROUPS), top = __float2half2_rn(two_to(TOP));
        u32 q[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            q[i] = e4m3x2(__hmul2(__hmul2(codes.a[i], i % 2 ? __high2half2(r) : __low2half2(r)), top));
        rows[0] = __byte_perm(q[0], q[2], 0x5410), rows[1] = __byte_perm(q[1], q[3], 0x5410);
    }

private:
    __device__ static float max_of_quad(float value) {
        value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
        return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
    }
};

}  // namespace qgemm
