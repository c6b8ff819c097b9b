// Scales and minimums folded into the weights: w = scale * level + minimum as operand A, in the type of x.
#pragma once

#include "fragment.cuh"

// Of rows g and g + 8, for as many steps as share a scale.
template <class T>
struct ScaledWeights;

// Levels are exact; scale, minimum and weight are rounded to half once each. The factor, a power of two, brings them
// into its range.
template <>
struct ScaledWeights<half> {
    half2 scale[2], minimum[2];

    __device__ ScaledWeights() {}
    __device__ ScaledWeights(float2 d, float2 m, float factor)
        : scale{__float2half2_rn(d.x * factor), __float2half2_rn(d.y * factor)},
          minimum{__float2half2_rn(m.x * factor), __float2half2_rn(m.y * factor)} {}
    template <class Format>
    __device__ Fragment weights(const typename Format::Codes& codes, int step) const {
        Fragment a = Format::fragment(codes, step);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            a.a[i] =
                Format::HAS_MINIMUM ? __hfma2(a.a[i], scale[i % 2], minimum[i % 2]) : __hmul2(a.a[i], scale[i % 2]);
        return a;
    }
};

// The weight is computed in float and rounded to bf16 once.
template <>
struct ScaledWeights<bf16> {
    float scale[2], minimum[2];

    __device__ ScaledWeights() {}
    __device__ ScaledWeights(float2 d, float2 m, float factor)
        : scale{d.x * factor, d.y * factor}, minimum{m.x * factor, m.y * factor} {}
    template <class Format>
    __device__ Fragment weights(const typename Format::Codes& codes, int step) const {
        Fragment a = Format::fragment(codes, step);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 level = __half22float2(a.a[i]);
            const float d = scale[i % 2], m = Format::HAS_MINIMUM ? minimum[i % 2] : 0.0f;
            const __nv_bfloat162 w = __floats2bfloat162_rn(level.x * d + m, level.y * d + m);
            a.a[i] = *reinterpret_cast<const half2*>(&w);
        }
        return a;
    }
};
