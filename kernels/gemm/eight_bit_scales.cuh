// Weights as signed bytes q = round(w / s): one s for a row and the EIGHT_BIT_COLUMNS of a stage, 127 of which are the
// largest weight that the scales and minimums there allow. Twin of qgemm/codec/eight_bits.py.
//
// A code of W is a half, (level + CODE_BIAS) * 2^-CODE_EXPONENT. One multiply-add makes q * 2^-CODE_UNIT of it; adding
// 1536 of that unit, in the same step where the zero is a whole number of units, rounds to whole units, whose two's
// complement is the low byte then.
// Config: TileConfig with LEAST_LEVEL, GREATEST_LEVEL (of the format). Pipeline: has fields(stage, k_block, tile), as
// WeightPipeline of smem.cuh.
#pragma once

#include "dequantize.cuh"
#include "tile_config.cuh"
#include "eight_bit_layout.cuh"

namespace qgemm {

// The largest power of two whose product with a number is below half's largest.
constexpr int room(float number) {
    int exponent = 0;
    while (number * (2 << exponent) < 60000.0f) ++exponent;
    return exponent;
}

// E4M3: whether bytes are e4m3 floats instead, see e4m3_scales.cuh.
template <class Config, bool E4M3 = false>
struct EightBitScales {
    using Format = typename Config::TileFormat;
    static constexpr int GROUP_SIZE = Config::GROUP_SIZE, K_BLOCKS = Config::K_BLOCKS;
    static constexpr int GROUPS = EIGHT_BIT_COLUMNS / GROUP_SIZE, EACH = (GROUPS + 3) / 4;  // of a stage, of a lane
    static constexpr bool HAS_MINIMUM = Format::HAS_MINIMUM, HAS_OFFSET = HAS_MINIMUM || Format::CODE_BIAS != 0;
    static constexpr int LEAST = Config::LEAST_LEVEL, GREATEST = Config::GREATEST_LEVEL;  // levels of the format
    // The largest scale in units of s.
    static constexpr float LARGEST_RATIO =
        HAS_MINIMUM ? 254.0f / (GREATEST - LEAST) : 127.0f / (GREATEST > -LEAST ? GREATEST : -LEAST);
    // Ratios times 2^EXPONENT are below half's largest; from 2^-14 on what a unit's fractions lose does not count.
    static constexpr int FEWEST = Format::CODE_EXPONENT - room(LARGEST_RATIO),
                         MOST = Format::CODE_EXPONENT < 14 ? Format::CODE_EXPONENT : 14;
    static constexpr int CODE_UNIT = FEWEST > MOST ? FEWEST : MOST;
    static constexpr int EXPONENT = Format::CODE_EXPONENT - CODE_UNIT;

    // Whether ratios are multiples of 1 / zero: the zero is a whole number of units then, so that one multiply-add
    // makes a rounded byte of a code. Half of 1 / zero times a level that is at most the zero is half a unit.
    static constexpr bool WHOLE_ZERO = !HAS_MINIMUM && Format::CODE_BIAS >= GREATEST && Format::CODE_BIAS >= -LEAST;
    // One multiply-add also does without a zero or a minimum.
    static constexpr bool ONE_STEP = WHOLE_ZERO || !HAS_OFFSET;

    float2 unit = {};  // s, of rows g and g + 8
    half2 ratio[EACH], offset[HAS_MINIMUM ? EACH : 1];

    // Scales and minimums of the groups of a lane, a quarter of a stage.
    struct Groups {
        float2 d[EACH], m[EACH];
    };
    template <class Pipeline>
    __device__ __forceinline__ static Groups load(const Pipeline& pipeline, int stage, u32 tile, int warp, int lane) {
        Groups groups;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int at = group(lane, i);
            const auto& fields = pipeline.fields(stage, at * GROUP_SIZE / K_BLOCK, tile);
            groups.d[i] = fields.scale(warp, lane / 4, at % Config::TILE_SCALES);
            groups.m[i] = fields.minimum(warp, lane / 4, at % Config::TILE_SCALES);
        }
        return groups;
    }
    // Groups of k_blocks from k_blocks on are not there.
    __device__ __forceinline__ void begin(const Groups& groups, int k_blocks, int lane) {
        const auto& [d, m] = groups;
        u32 largest[2] = {};
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const u32 there = group(lane, i) * GROUP_SIZE / K_BLOCK < k_blocks ? ~0u : 0;
            largest[0] = max(largest[0], bound(d[i].x, m[i].x) & there);
            largest[1] = max(largest[1], bound(d[i].y, m[i].y) & there);
        }
        const float inverse[2] = {take(largest[0], unit.x), take(largest[1], unit.y)};
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const float x = in_parts(d[i].x * inverse[0]), y = in_parts(d[i].y * inverse[1]);
            ratio[i] = __floats2half2_rn(x * (PART * two_to(EXPONENT)),
                                         y * (PART * two_to(EXPONENT - Format::HIGH_ROW_SHIFT)));
            if constexpr (HAS_MINIMUM)
                offset[i] = __floats2half2_rn(without_bias(m[i].x * inverse[0], x) * two_to(-CODE_UNIT),
                                              without_bias(m[i].y * inverse[1], y) * two_to(-CODE_UNIT));
        }
    }
    template <class Pipeline>
    __device__ __forceinline__ void begin(const Pipeline& pipeline, int stage, u32 tile, int k_blocks, int warp,
                                          int lane) {
        begin(load(pipeline, stage, tile, warp, lane), k_blocks, lane);
    }

    // Signed bytes of a step: of rows g and g + 8, columns 2t, 2t + 1, 2t + 8, 2t + 9. k_block: of the stage.
    __device__ __forceinline__ void bytes(u32 (&rows)[2], const Fragment& codes, int k_block, int step) const {
        const int at = (k_block * K_BLOCK + 16 * step) / GROUP_SIZE;
        const half2 r = shfl_quad(ratio[at % EACH], at / EACH);
        const half2 magic = __float2half2_rn(1536 * two_to(-CODE_UNIT));
        half2 o = ONE_STEP ? magic : half2{};
        if constexpr (HAS_MINIMUM)
            o = shfl_quad(offset[at % EACH], at / EACH);
        else if constexpr (HAS_OFFSET)  // of the rounded ratio, so that level 0 is 0
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
    static constexpr float ZERO = WHOLE_ZERO ? Format::CODE_BIAS : 1, PART = 1 / ZERO;  // of a ratio, see WHOLE_ZERO

    // Group number i of a lane; where there are fewer than lanes, some have the same.
    __device__ static int group(int lane, int i) { return (lane % 4 * EACH + i) % GROUPS; }
    __device__ static float in_parts(float ratio) { return WHOLE_ZERO ? rintf(ratio * ZERO) : ratio; }
    // The compiler keeps a product with 0, which may be NaN.
    __device__ static float without_bias(float minimum, float ratio) {
        return Format::CODE_BIAS == 0 ? minimum : minimum - Format::CODE_BIAS * ratio;
    }
    // Bits of a magnitude, which compare like integers; NaN is above all numbers.
    __device__ static u32 magnitude(float value) { return __float_as_uint(value) & 0x7fffffff; }
    // Of the largest weight that a scale and a minimum allow, in units of FARTHEST.
    static constexpr float FARTHEST = HAS_MINIMUM ? 1 : GREATEST > -LEAST ? GREATEST : -LEAST;
    __device__ static u32 bound(float d, float m) {
        if constexpr (!HAS_MINIMUM) return magnitude(d);
        return max(magnitude(LEAST == 0 ? m : d * LEAST + m), magnitude(d * GREATEST + m));
    }
    // s of the largest of a quad's bounds, and 1 / s, 0 where there is none. Not finite: s is NaN.
    __device__ static float take(u32 largest, float& unit) {
        largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
        largest = __float_as_uint(__uint_as_float(largest) * FARTHEST);
        constexpr u32 INFINITE = 0x7f800000, COUNTS = (127 - EIGHT_BIT_LEAST) << 23;
        const float value = __uint_as_float(largest);
        unit = largest >= INFINITE ? __uint_as_float(0x7fffffff) : largest < COUNTS ? 0.0f : value * (1 / 127.0f);
        return largest >= INFINITE || largest < COUNTS ? 0.0f : reciprocal(value * (1 / 128.0f)) * (127 / 128.0f);
    }
};

}  // namespace qgemm
