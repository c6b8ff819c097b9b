// Powers of two, one for each row of W, that bring weights into the range of half: scales and minimums are multiplied
// by 2^-e as they are loaded, accumulators by 2^e at the end. See qgemm/cuda/layout/row_scale.py.
//
// Config: TileConfig with In (half, bf16), ROW_SCALE_LEVEL, ROW_SCALE_HEADROOM, ROW_SCALE_MIN, ROW_SCALE_MAX.
#pragma once

#include "dequantize.cuh"

namespace qgemm {

template <class T>
constexpr bool IS_HALF = false;
template <>
constexpr bool IS_HALF<half> = true;

// Whether one multiply-add makes a weight of a code as it is masked out of its word: scales are exact as halves, or as
// products of two, and absorb the power of two that such codes lack; the minimum absorbs the code of level 0.
template <class Config>
constexpr bool ONE_FMA = IS_HALF<typename Config::In> && Config::TileFormat::SCALE_FACTORS > 0;

template <class Config>
using ScaleOf = GroupScale<typename Config::In, ONE_FMA<Config> || Config::TileFormat::HAS_MINIMUM>;

// Codes as halves -> levels times 2^ROW_SCALE_LEVEL; the codes of rows g + 8 stand HIGH_ROW_SHIFT bits higher. Half
// arithmetic is exact here. Codes that are levels, and those of ONE_FMA, stay as they are.
template <class Config>
struct Levels {
    using Format = typename Config::TileFormat;
    static constexpr int LEVEL = Config::ROW_SCALE_LEVEL;
    static_assert(!ONE_FMA<Config> || LEVEL == -Format::CODE_EXPONENT, "codes are levels as they lie");
    half2 factor[2], zero;

    __device__ Levels()
        : factor{__float2half2_rn(two_to(LEVEL + Format::CODE_EXPONENT)),
                 __float2half2_rn(two_to(LEVEL + Format::CODE_EXPONENT - Format::HIGH_ROW_SHIFT))},
          zero(__float2half2_rn(-Format::CODE_BIAS * two_to(LEVEL))) {}
    __device__ half2 of(half2 codes_f16, int r) const {
        if constexpr (Format::CODES_ARE_LEVELS || ONE_FMA<Config>) return codes_f16;
        return Format::CODE_BIAS ? __hfma2(codes_f16, factor[r], zero) : __hmul2(codes_f16, factor[r]);
    }
};

// The minimum of ONE_FMA where the format has none: the level of code 0, -CODE_BIAS, times the scale.
template <class Config>
__device__ inline void fold_zero(ScaleOf<Config>& group) {
    using Format = typename Config::TileFormat;
    if constexpr (ONE_FMA<Config> && !Format::HAS_MINIMUM)
        group.minimum =
            __hmul2(group.scale,
                    __floats2half2_rn(-Format::CODE_BIAS * two_to(Config::ROW_SCALE_LEVEL),
                                      -Format::CODE_BIAS * two_to(Config::ROW_SCALE_LEVEL + Format::HIGH_ROW_SHIFT)));
}

// The exponents of rows g and g + 8: their weights are multiplied by 2^-weight.
template <class Config>
struct RowExponent {
    int weight[2];

    __device__ explicit RowExponent(float2 row_absmax) : weight{of(row_absmax.x), of(row_absmax.y)} {}
    __device__ static int of(float absmax) {
        return max(Config::ROW_SCALE_MIN,
                   min(int(__float_as_uint(absmax) >> 23) - 126 + Config::ROW_SCALE_HEADROOM, Config::ROW_SCALE_MAX));
    }
    // The exponents by which scales and minimums are multiplied.
    __device__ int scale(int r) const {
        return -weight[r] - Config::ROW_SCALE_LEVEL - (ONE_FMA<Config> && r ? Config::TileFormat::HIGH_ROW_SHIFT : 0);
    }
    __device__ int minimum(int r) const { return -weight[r]; }
    // The factor by which accumulators are multiplied.
    __device__ float acc(int r) const { return two_to(weight[r]); }
};

// 2^x and 2^y, for rows g and g + 8, as products of three halves, none of which overflows or is rounded: of 2^30 at
// most the first is 2^15 and the second the rest, of less than 1 the last is 2^-14 at least and the first the rest.
struct Power {
    half2 first, second, last;

    __device__ Power(int x, int y) {
        first = pair(min(max(x, 0), 15) + min(x + 14, 0), min(max(y, 0), 15) + min(y + 14, 0));
        second = pair(max(x - 15, 0), max(y - 15, 0));
        last = pair(max(min(x, 0), -14), max(min(y, 0), -14));
    }
    __device__ static half2 pair(int x, int y) { return __floats2half2_rn(two_to(x), two_to(y)); }
};

// A tile's fields -> scale and minimum of a group, multiplied by their powers of two: (fields, m16, g, index).
// FACTORS: in half arithmetic if scales are halves (1) or products of two (2), else in float (0, 3).
template <class Config, int FACTORS = ONE_FMA<Config> ? Config::TileFormat::SCALE_FACTORS : 0>
struct ScaleLoader;

template <class Config>
struct ScaleLoader<Config, 0> {
    float2 scale, minimum;

    __device__ explicit ScaleLoader(const RowExponent<Config>& row_exponent)
        : scale{two_to(row_exponent.scale(0)), two_to(row_exponent.scale(1))},
          minimum{two_to(row_exponent.minimum(0)), two_to(row_exponent.minimum(1))} {}
    __device__ ScaleOf<Config> operator()(const typename Config::TileFormat& fields, int m16, int g, int index) const {
        return {multiply(fields.scale(m16, g, index), scale), multiply(fields.minimum(m16, g, index), minimum)};
    }

private:
    __device__ static float2 multiply(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }
};

template <class Config>
struct ScaleLoader<Config, 3> : ScaleLoader<Config, 0> {
    using ScaleLoader<Config, 0>::ScaleLoader;
};

// A zero of each group makes a minimum -scale * zero that is rounded once. An integer takes the power of two down to
// half's least number, 2^-24, the scale what is left: weights are at most twice 2^-e, so that a scale which is a
// subnormal half then adds less than that number. A half as zero has bits of its own, and their product is made in
// float.
template <class Config>
struct ScaleLoader<Config, 1> {
    using Format = typename Config::TileFormat;
    half2 first, rest, minimum, zero;
    float2 minimum_f32;

    __device__ explicit ScaleLoader(const RowExponent<Config>& row_exponent) {
        const Power scale(row_exponent.scale(0), row_exponent.scale(1));
        first = scale.first, rest = __hmul2(scale.second, scale.last);
        const int x = row_exponent.minimum(0), y = row_exponent.minimum(1);
        if constexpr (Format::GROUP_ZERO) {
            minimum = Power::pair(min(x + 24, 0), min(y + 24, 0)), zero = Power::pair(max(x, -24), max(y, -24));
            minimum_f32 = {two_to(x), two_to(y)};
        } else {
            minimum = Power::pair(x, y);
        }
    }
    __device__ ScaleOf<Config> operator()(const Format& fields, int m16, int g, int index) const {
        ScaleOf<Config> found;
        const half2 d = fields.half_scale(m16, g, index);
        found.scale = __hmul2(__hmul2(d, first), rest);
        if constexpr (Format::GROUP_ZERO) {
            const float2 of_group = fields.minimum(m16, g, index);
            if constexpr (Format::INTEGER_ZERO)
                found.minimum = __hmul2(__hneg2(__hmul2(d, minimum)), __hmul2(fields.half_zero(m16, g, index), zero));
            else
                found.minimum = __floats2half2_rn(of_group.x * minimum_f32.x, of_group.y * minimum_f32.y);
        } else if constexpr (Format::HAS_MINIMUM) {
            found.minimum = __hmul2(fields.half_minimum(m16, g, index), minimum);
        }
        return found;
    }
};

// Products of a half and an integer below 256: the integer takes the power of two's part that is less than 1, so that
// the product alone is rounded.
template <class Config>
struct ScaleLoader<Config, 2> {
    Power scale, minimum;

    __device__ explicit ScaleLoader(const RowExponent<Config>& row_exponent)
        : scale(row_exponent.scale(0), row_exponent.scale(1)),
          minimum(row_exponent.minimum(0), row_exponent.minimum(1)) {}
    __device__ ScaleOf<Config> operator()(const typename Config::TileFormat& fields, int m16, int g, int index) const {
        ScaleOf<Config> found;
        const half2 d = __hmul2(__hmul2(fields.half_scale(m16, g, index), scale.first), scale.second);
        found.scale = __hmul2(d, fields.sub_scale(m16, g, index, scale.last));
        if constexpr (Config::TileFormat::HAS_MINIMUM) {
            half2 m = __hmul2(fields.half_minimum(m16, g, index), minimum.first);
            if constexpr (Config::ROW_SCALE_MIN < -15) m = __hmul2(m, minimum.second);
            found.minimum = __hmul2(m, fields.sub_minimum(m16, g, index, minimum.last));
        }
        return found;
    }
};

}  // namespace qgemm
