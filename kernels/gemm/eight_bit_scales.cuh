// Weights as signed bytes q = round(w / s). A row has one s for the EIGHT_BIT_COLUMNS of a stage; 127 * s is the
// largest weight that the scales and minimums there allow. Twin of qgemm/codec/eight_bits.py.
//
// A code of W is a half, (level + CODE_BIAS) * 2^-CODE_EXPONENT. One multiply-add turns it into q * 2^-CODE_UNIT.
// Adding 1536 * 2^-CODE_UNIT rounds to whole multiples of 2^-CODE_UNIT, and the low byte of the half is then q in two's
// complement. The multiply-add includes this addition if the zero of the codes is a whole number of units (ONE_STEP).
// Config: TileConfig with LEAST_LEVEL and GREATEST_LEVEL of the format. Pipeline: has fields(stage, k_block, tile), as
// WeightPipeline of smem.cuh.
#pragma once

#include "dequantize.cuh"
#include "tile_config.cuh"
#include "eight_bit_layout.cuh"

namespace qgemm {

// The largest exponent with number * 2^exponent < 60000, which is below half's largest number.
constexpr int half_headroom(float number) {
    int exponent = 0;
    while (number * (2 << exponent) < 60000.0f) ++exponent;
    return exponent;
}

// Scales and minimums of the groups of a stage, of rows g and g + 8. Each lane of a quad loads a quarter of the groups.
// Rounding: computes s and the ratios of the scales to s in begin(groups, k_blocks, lane), and bytes of W from codes.
template <class Config, class Rounding>
struct StageScales {
    using Format = typename Config::TileFormat;
    static constexpr int GROUP_SIZE = Config::GROUP_SIZE;
    static constexpr int W_GROUPS = EIGHT_BIT_COLUMNS / GROUP_SIZE, LANE_GROUPS = (W_GROUPS + 3) / 4;

    struct Groups {
        float2 d[LANE_GROUPS], m[LANE_GROUPS];
    };
    template <class Pipeline>
    __device__ __forceinline__ static Groups load(const Pipeline& pipeline, int stage, u32 tile, int warp, int lane) {
        Groups groups;
#pragma unroll
        for (int i = 0; i < LANE_GROUPS; ++i) {
            const int index = group(lane, i);
            const auto& fields = pipeline.fields(stage, index * GROUP_SIZE / K_BLOCK, tile);
            groups.d[i] = fields.scale(warp, lane / 4, index % Config::TILE_SCALES);
            groups.m[i] = fields.minimum(warp, lane / 4, index % Config::TILE_SCALES);
        }
        return groups;
    }
    template <class Pipeline>
    __device__ __forceinline__ void begin(const Pipeline& pipeline, int stage, u32 tile, int k_blocks, int warp,
                                          int lane) {
        static_cast<Rounding*>(this)->begin(load(pipeline, stage, tile, warp, lane), k_blocks, lane);
    }

protected:
    // Group i of a lane. With fewer groups than lanes, some lanes have the same group.
    __device__ static int group(int lane, int i) { return (lane % 4 * LANE_GROUPS + i) % W_GROUPS; }
    // Whether group i of a lane is inside the first k_blocks of the stage.
    __device__ static bool inside(int lane, int i, int k_blocks) {
        return group(lane, i) * GROUP_SIZE / K_BLOCK < k_blocks;
    }
    // The group of a step of a k_block of the stage.
    __device__ static int group_of_step(int k_block, int step) { return (k_block * K_BLOCK + 16 * step) / GROUP_SIZE; }
};

// E4M3: bytes are e4m3 floats instead, see e4m3_scales.cuh.
template <class Config, bool E4M3 = false>
struct EightBitScales : StageScales<Config, EightBitScales<Config, E4M3>> {
    using Base = StageScales<Config, EightBitScales>;
    using Format = typename Config::TileFormat;
    using Base::begin, Base::LANE_GROUPS;
    using typename Base::Groups;
    static constexpr bool HAS_MINIMUM = Format::HAS_MINIMUM, HAS_OFFSET = HAS_MINIMUM || Format::CODE_BIAS != 0;
    static constexpr int MIN_LEVEL = Config::LEAST_LEVEL, MAX_LEVEL = Config::GREATEST_LEVEL;
    // The largest possible ratio of a scale to s.
    static constexpr float LARGEST_RATIO =
        HAS_MINIMUM ? 254.0f / (MAX_LEVEL - MIN_LEVEL) : 127.0f / (MAX_LEVEL > -MIN_LEVEL ? MAX_LEVEL : -MIN_LEVEL);
    // Ratios times 2^EXPONENT are below half's largest number. From 2^-14 on, the fractions that units lose are
    // insignificant.
    static constexpr int MIN_UNIT = Format::CODE_EXPONENT - half_headroom(LARGEST_RATIO),
                         MAX_UNIT = Format::CODE_EXPONENT < 14 ? Format::CODE_EXPONENT : 14;
    static constexpr int CODE_UNIT = MIN_UNIT > MAX_UNIT ? MIN_UNIT : MAX_UNIT;
    static constexpr int EXPONENT = Format::CODE_EXPONENT - CODE_UNIT;

    // Ratios are rounded to multiples of 1 / CODE_BIAS, so that the zero is a whole number of units. The error of a
    // weight is at most half of 1 / CODE_BIAS times a level, half a unit, since no level is above CODE_BIAS.
    static constexpr bool WHOLE_ZERO =
        !HAS_MINIMUM && Format::CODE_BIAS >= MAX_LEVEL && Format::CODE_BIAS >= -MIN_LEVEL;
    // One multiply-add makes a rounded byte of a code.
    static constexpr bool ONE_STEP = WHOLE_ZERO || !HAS_OFFSET;

    float2 unit = {};  // s of rows g and g + 8
    half2 ratio[LANE_GROUPS], offset[HAS_MINIMUM ? LANE_GROUPS : 1];

    // Groups from k_blocks on are beyond K and do not count.
    __device__ __forceinline__ void begin(const Groups& groups, int k_blocks, int lane) {
        const auto& [d, m] = groups;
        u32 largest[2] = {};
#pragma unroll
        for (int i = 0; i < LANE_GROUPS; ++i) {
            const u32 mask = Base::inside(lane, i, k_blocks) ? ~0u : 0;
            largest[0] = max(largest[0], bound(d[i].x, m[i].x) & mask);
            largest[1] = max(largest[1], bound(d[i].y, m[i].y) & mask);
        }
        const float inverse[2] = {set_unit(largest[0], unit.x), set_unit(largest[1], unit.y)};
#pragma unroll
        for (int i = 0; i < LANE_GROUPS; ++i) {
            const float x = in_parts(d[i].x * inverse[0]), y = in_parts(d[i].y * inverse[1]);
            ratio[i] = __floats2half2_rn(x * (PART * two_to(EXPONENT)),
                                         y * (PART * two_to(EXPONENT - Format::HIGH_ROW_SHIFT)));
            if constexpr (HAS_MINIMUM)
                offset[i] = __floats2half2_rn(without_bias(m[i].x * inverse[0], x) * two_to(-CODE_UNIT),
                                              without_bias(m[i].y * inverse[1], y) * two_to(-CODE_UNIT));
        }
    }

    // Signed bytes of a step, of rows g and g + 8, columns 2t, 2t + 1, 2t + 8, 2t + 9. k_block: number in the stage.
    __device__ __forceinline__ void bytes(u32 (&rows)[2], const Fragment& codes, int k_block, int step) const {
        const int group = Base::group_of_step(k_block, step);
        const half2 r = shfl_quad(ratio[group % LANE_GROUPS], group / LANE_GROUPS);
        const half2 magic = __float2half2_rn(1536 * two_to(-CODE_UNIT));
        half2 o = ONE_STEP ? magic : half2{};
        if constexpr (HAS_MINIMUM)
            o = shfl_quad(offset[group % LANE_GROUPS], group / LANE_GROUPS);
        else if constexpr (HAS_OFFSET)  // from the rounded ratio, so that level 0 is exactly 0
            o = __hfma2(r,
                        __floats2half2_rn(-Format::CODE_BIAS * two_to(-Format::CODE_EXPONENT),
                                          -Format::CODE_BIAS * two_to(Format::HIGH_ROW_SHIFT - Format::CODE_EXPONENT)),
                        o);
        u32 q[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const half2 r2 = i % 2 ? __high2half2(r) : __low2half2(r), o2 = i % 2 ? __high2half2(o) : __low2half2(o);
            half2 rounded = __hfma2(codes.a[i], r2, o2);
            if constexpr (!ONE_STEP) rounded = __hadd2(rounded, magic);
            q[i] = *reinterpret_cast<const u32*>(&rounded);
        }
        rows[0] = __byte_perm(q[0], q[2], 0x6420), rows[1] = __byte_perm(q[1], q[3], 0x6420);
    }

private:
    // WHOLE_ZERO: ratios are whole numbers of PART.
    static constexpr float ZERO = WHOLE_ZERO ? Format::CODE_BIAS : 1, PART = 1 / ZERO;

    __device__ static float in_parts(float ratio) { return WHOLE_ZERO ? rintf(ratio * ZERO) : ratio; }
    // The compiler would keep a product with 0, because it may be NaN.
    __device__ static float without_bias(float minimum, float ratio) {
        return Format::CODE_BIAS == 0 ? minimum : minimum - Format::CODE_BIAS * ratio;
    }
    // Bits of a magnitude. They compare like integers, and NaN is above all numbers.
    __device__ static u32 magnitude(float value) { return __float_as_uint(value) & 0x7fffffff; }
    // The largest weight that a scale and a minimum allow, in units of FARTHEST.
    static constexpr float FARTHEST = HAS_MINIMUM ? 1 : MAX_LEVEL > -MIN_LEVEL ? MAX_LEVEL : -MIN_LEVEL;
    __device__ static u32 bound(float d, float m) {
        if constexpr (!HAS_MINIMUM) return magnitude(d);
        return max(magnitude(MIN_LEVEL == 0 ? m : d * MIN_LEVEL + m), magnitude(d * MAX_LEVEL + m));
    }
    // Sets s from the largest bound of a quad and returns 1 / s, or 0 if s is 0. s is NaN if the bound is not finite.
    __device__ static float set_unit(u32 largest, float& unit) {
        largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
        largest = __float_as_uint(__uint_as_float(largest) * FARTHEST);
        constexpr u32 INFINITE = 0x7f800000, NONZERO = (127 - EIGHT_BIT_LEAST) << 23;
        const float value = __uint_as_float(largest);
        unit = largest >= INFINITE ? __uint_as_float(0x7fffffff) : largest < NONZERO ? 0.0f : value * (1 / 127.0f);
        return largest >= INFINITE || largest < NONZERO ? 0.0f : reciprocal(value * (1 / 128.0f)) * (127 / 128.0f);
    }
};

}  // namespace qgemm
