// RowExponent: an exponent e for each row of W that brings its weights into the range of half. Scales and minimums are
// multiplied by 2^-e as they are loaded, accumulators by 2^e at the end. See qgemm/cuda/layout/row_scale.py.
//
// Config: TileConfig with ROW_SCALE_LEVEL, ROW_SCALE_HEADROOM, ROW_SCALE_MIN, ROW_SCALE_MAX.
#pragma once

#include "dequantize.cuh"

namespace qgemm {

// Whether one multiply-add turns a code into a weight, straight from the bits masked out of its word. It requires
// scales that are exact as a half or as a product of two halves: the scale absorbs the power of two that the masked
// code lacks, the minimum absorbs the code of level 0.
template <class Config>
constexpr bool ONE_FMA = Config::TileFormat::SCALE_FACTORS > 0;

template <class Config>
using ScaleOf = GroupScale<ONE_FMA<Config> || Config::TileFormat::HAS_MINIMUM>;

// Codes as halves -> levels times 2^ROW_SCALE_LEVEL, exactly. The codes of rows g + 8 are HIGH_ROW_SHIFT bits higher.
// Codes that already are levels, and codes of ONE_FMA, are unchanged.
template <class Config>
struct Levels {
    using Format = typename Config::TileFormat;
    static constexpr int LEVEL = Config::ROW_SCALE_LEVEL;
    static_assert(!ONE_FMA<Config> || LEVEL == -Format::CODE_EXPONENT, "codes are used without conversion");
    half2 factor[2], zero;

    __device__ Levels()
        : factor{__float2half2_rn(two_to(LEVEL + Format::CODE_EXPONENT)),
                 __float2half2_rn(two_to(LEVEL + Format::CODE_EXPONENT - Format::HIGH_ROW_SHIFT))},
          zero(__float2half2_rn(-Format::CODE_BIAS * two_to(LEVEL))) {}
    __device__ half2 from_codes(half2 codes_f16, int r) const {
        if constexpr (Format::CODES_ARE_LEVELS || ONE_FMA<Config>) return codes_f16;
        return Format::CODE_BIAS ? __hfma2(codes_f16, factor[r], zero) : __hmul2(codes_f16, factor[r]);
    }
};

// Sets the minimum of ONE_FMA for formats without one: the scale times the level of code 0, -CODE_BIAS.
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

    __device__ explicit RowExponent(float2 row_absmax) : weight{exponent(row_absmax.x), exponent(row_absmax.y)} {}
    __device__ static int exponent(float absmax) {
        return max(Config::ROW_SCALE_MIN,
                   min(int(__float_as_uint(absmax) >> 23) - 126 + Config::ROW_SCALE_HEADROOM, Config::ROW_SCALE_MAX));
    }
    // Exponents of the factors of scales and of minimums.
    __device__ int scale(int r) const {
        return -weight[r] - Config::ROW_SCALE_LEVEL - (ONE_FMA<Config> && r ? Config::TileFormat::HIGH_ROW_SHIFT : 0);
    }
    __device__ int minimum(int r) const { return -weight[r]; }
    // The factor of accumulators.
    __device__ float acc(int r) const { return two_to(weight[r]); }
};

// 2^x and 2^y, for rows g and g + 8, each as a product of three halves that are exact and do not overflow. Exponents up
// to 30 are first (at most 2^15) times second; negative exponents are last (at least 2^-14) times first.
struct Power {
    half2 first, second, last;

    __device__ Power(int x, int y) {
        first = pair(min(max(x, 0), 15) + min(x + 14, 0), min(max(y, 0), 15) + min(y + 14, 0));
        second = pair(max(x - 15, 0), max(y - 15, 0));
        last = pair(max(min(x, 0), -14), max(min(y, 0), -14));
    }
    __device__ static half2 pair(int x, int y) { return __floats2half2_rn(two_to(x), two_to(y)); }
};

// Loads scale and minimum of a group, (fields, m16, g, index), and multiplies them by their powers of two. FACTORS:
// half arithmetic if scales are halves (1) or products of two halves (2), else float (0, 3).
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

// Formats with a zero per group have the minimum -scale * zero, which is rounded once. For an integer zero the power of
// two is split: the zero absorbs it down to half's smallest number, 2^-24, the scale absorbs the rest. Weights are at
// most 2 * 2^-e, so the error of a scale that becomes subnormal is below 2^-24. A zero that is a half is multiplied in
// float, because its fraction would be rounded again.
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
        ScaleOf<Config> group;
        const half2 d = fields.half_scale(m16, g, index);
        group.scale = __hmul2(__hmul2(d, first), rest);
        if constexpr (Format::GROUP_ZERO) {
            const float2 m = fields.minimum(m16, g, index);
            if constexpr (Format::INTEGER_ZERO)
                group.minimum = __hmul2(__hneg2(__hmul2(d, minimum)), __hmul2(fields.half_zero(m16, g, index), zero));
            else
                group.minimum = __floats2half2_rn(m.x * minimum_f32.x, m.y * minimum_f32.y);
        } else if constexpr (Format::HAS_MINIMUM) {
            group.minimum = __hmul2(fields.half_minimum(m16, g, index), minimum);
        }
        return group;
    }
};

// Scales are products of a half and an integer below 256. The integer absorbs the negative part of the exponent, so
// that only the product is rounded.
template <class Config>
struct ScaleLoader<Config, 2> {
    Power scale, minimum;

    __device__ explicit ScaleLoader(const RowExponent<Config>& row_exponent)
        : scale(row_exponent.scale(0), row_exponent.scale(1)),
          minimum(row_exponent.minimum(0), row_exponent.minimum(1)) {}
    __device__ ScaleOf<Config> operator()(const typename Config::TileFormat& fields, int m16, int g, int index) const {
        ScaleOf<Config> group;
        const half2 d = __hmul2(__hmul2(fields.half_scale(m16, g, index), scale.first), scale.second);
        group.scale = __hmul2(d, fields.sub_scale(m16, g, index, scale.last));
        if constexpr (Config::TileFormat::HAS_MINIMUM) {
            half2 m = __hmul2(fields.half_minimum(m16, g, index), minimum.first);
            if constexpr (Config::ROW_SCALE_MIN < -15) m = __hmul2(m, minimum.second);
            group.minimum = __hmul2(m, fields.sub_minimum(m16, g, index, minimum.last));
        }
        return group;
    }
};

}  // namespace qgemm
