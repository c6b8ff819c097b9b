// Weights as e4m3 numbers q, the nearest to w / s: one s for a row and the EIGHT_BIT_COLUMNS of a stage, the largest
// scale there, a power of two, times 2^-TOP. Twin of e4m3_weights in qgemm/codec/eight_bits.py.
//
// Formats whose scales are powers of two and whose codes are halves, level * 2^-CODE_EXPONENT: times the ratio of their
// scale to the largest they lose no bit that e4m3 has.
// Config, Pipeline: as in eight_bit_scales.cuh.
#pragma once

#include "eight_bit_scales.cuh"
#include "ptx/cvt_e4m3.cuh"

namespace qgemm {

template <class Config>
struct EightBitScales<Config, true> {
    using Format = typename Config::TileFormat;
    static constexpr int GROUP_SIZE = Config::GROUP_SIZE;
    static constexpr int GROUPS = EIGHT_BIT_COLUMNS / GROUP_SIZE, EACH = GROUPS / 4;  // of a stage, of a lane
    static_assert(Format::CODES_ARE_LEVELS && Format::CODE_BIAS == 0 && Format::HIGH_ROW_SHIFT == 0,
                  "codes are halves, as they stand");
    static_assert(!Format::HAS_MINIMUM && GROUPS % 4 == 0,
                  "weights are levels times a scale; lanes share these evenly");

    // The largest power of two by which no level is above e4m3's largest number.
    static constexpr int top() {
        constexpr int LEVEL =
            Config::GREATEST_LEVEL > -Config::LEAST_LEVEL ? Config::GREATEST_LEVEL : -Config::LEAST_LEVEL;
        int exponent = 0;
        while ((LEVEL << (exponent + 1)) <= 448) ++exponent;
        return exponent;
    }
    static constexpr int TOP = top();

    float2 unit = {};   // s, of rows g and g + 8
    half2 ratio[EACH];  // 2^CODE_EXPONENT at most

    // Scales of the groups of a lane, a quarter of a stage.
    struct Groups {
        float2 d[EACH];
    };
    template <class Pipeline>
    __device__ __forceinline__ static Groups load(const Pipeline& pipeline, int stage, u32 tile, int warp, int lane) {
        Groups groups;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int at = group(lane, i);
            const auto& fields = pipeline.fields(stage, at * GROUP_SIZE / K_BLOCK, tile);
            groups.d[i] = fields.scale(warp, lane / 4, at % Config::TILE_SCALES);
        }
        return groups;
    }
    // Groups of k_blocks from k_blocks on are not there.
    __device__ __forceinline__ void begin(const Groups& groups, int k_blocks, int lane) {
        const auto& d = groups.d;
        float2 largest = {};
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (group(lane, i) * GROUP_SIZE / K_BLOCK < k_blocks)
                largest = {fmaxf(largest.x, d[i].x), fmaxf(largest.y, d[i].y)};
        largest = {largest_of_quad(largest.x), largest_of_quad(largest.y)};
        unit = {largest.x * two_to(-TOP), largest.y * two_to(-TOP)};
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            ratio[i] = __floats2half2_rn(d[i].x / largest.x * two_to(Format::CODE_EXPONENT),
                                         d[i].y / largest.y * two_to(Format::CODE_EXPONENT));
    }
    template <class Pipeline>
    __device__ __forceinline__ void begin(const Pipeline& pipeline, int stage, u32 tile, int k_blocks, int warp,
                                          int lane) {
        begin(load(pipeline, stage, tile, warp, lane), k_blocks, lane);
    }

    // Bytes of a step: of rows g and g + 8, columns 2t, 2t + 1, 2t + 8, 2t + 9. k_block: of the stage.
    __device__ __forceinline__ void bytes(u32 (&rows)[2], const Fragment& codes, int k_block, int step) const {
        const int at = (k_block * K_BLOCK + 16 * step) / GROUP_SIZE;
        const half2 r = shfl_quad(ratio[at % EACH], at / EACH), top = __float2half2_rn(two_to(TOP));
        u32 q[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            q[i] = e4m3x2(__hmul2(__hmul2(codes.a[i], i % 2 ? __high2half2(r) : __low2half2(r)), top));
        rows[0] = __byte_perm(q[0], q[2], 0x5410), rows[1] = __byte_perm(q[1], q[3], 0x5410);
    }

private:
    __device__ static int group(int lane, int i) { return lane % 4 * EACH + i; }
    __device__ static float largest_of_quad(float value) {
        value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
        return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
    }
};

}  // namespace qgemm
